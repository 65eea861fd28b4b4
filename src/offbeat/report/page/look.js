// How numbers and charts look, on every page.

const FONT = getComputedStyle(document.body).fontFamily;

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const number = (value) => Number(value.toPrecision(6)).toLocaleString("en", { maximumFractionDigits: 9 });
const percent = (share) => `${Math.round(100 * share)} %`;
const count = (many, name) => `${many.toLocaleString("en")} ${name}${many === 1 ? "" : "s"}`;
const dot = (name) => `<i class="swatch" style="background:${css(name)}"></i>`;
const escaped = (text) => text.replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);

function tooltipStyle() {
  return {
    backgroundColor: css("card"), borderColor: css("line"), padding: [8, 12],
    textStyle: { color: css("ink"), fontSize: 13, fontFamily: FONT },
    extraCssText: "box-shadow:0 4px 18px rgb(0 0 0 / 14%);border-radius:8px;line-height:1.5;max-width:88vw;white-space:normal",
  };
}

function axis(extra) {
  return {
    axisLine: { show: false }, axisTick: { show: false },
    splitLine: { lineStyle: { color: css("faint") } },
    nameTextStyle: { color: css("soft") },
    ...extra,
    axisLabel: { color: css("soft"), fontSize: 12, hideOverlap: true, ...extra.axisLabel },
  };
}
