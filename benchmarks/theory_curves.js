// Draws what theory_curves.py has found; `data`, `figures`, SUBTEXTS and the report's charts.js are there.

const WIDE = new Set(["m-synchronous, best m", "optimal"]);
const PANEL = { left: [70, 536], top: [118, 444], width: 400, height: 250 };
const RANGES = [[0.8, 150], [6, 150], [20, 1500], [20, 2e6]];
const text = (colour, fontSize, fontWeight = 400) => ({ color: css(colour), fontSize, fontWeight, fontFamily: FONT });
const SUPERSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹";

// Powers of ten alone: the ends of an axis are none.
function power(value) {
  const exponent = Math.log10(value);
  if (Math.abs(exponent - Math.round(exponent)) > 1e-9) return "";
  return exponent > 3.5 ? `10${SUPERSCRIPT[Math.round(exponent)]}` : number(value);
}

// A line that goes no further down: wide, under the thin ones that it has come along with.
function widen(line, reached, colour, below) {
  const position = [reached[0] < 300 ? 4 : -52, below ? 15 : -20];
  Object.assign(line, { z: 2, lineStyle: { width: 7, color: colour, opacity: 0.45, cap: "round" } });
  line.markPoint = {
    symbol: "circle", symbolSize: 9, silent: true,
    itemStyle: { color: colour, borderColor: css("card"), borderWidth: 1.5 },
    data: [{
      coord: reached,
      label: { show: true, formatter: `m = ${number(reached[0])}`, position, ...text("ink", 12.5, 600), color: colour },
    }],
  };
}

// The report's chart of one profile, on logarithmic axes.
function panel(name, at) {
  const { series, xAxis, yAxis } = curveOption(`${at}-n`, new Set());
  const left = PANEL.left[at % 2], top = PANEL.top[at >> 1];
  const [least, most] = RANGES[at];
  for (const line of series) {
    Object.assign(line, { xAxisIndex: at, yAxisIndex: at });
    if (!WIDE.has(line.name)) continue;
    const reached = line.data.find(([n]) => n === figures[name].m[line.name]);
    widen(line, reached, line.itemStyle.color, at === 3 || (at > 0 && line.name === "optimal"));
  }
  return {
    series,
    grid: { left, top, width: PANEL.width, height: PANEL.height },
    title: { left: left - 5, top: top - 28, text: `{profile|τᵢ = ${name}}   ${SUBTEXTS[at]}`, textStyle: { ...text("soft", 12.5), rich: { profile: text("ink", 15, 600) } } },
    xAxis: {
      ...xAxis, gridIndex: at, type: "log", min: 1, max: 1000,
      name: at > 1 ? "workers, the fastest first" : "", axisLabel: { ...xAxis.axisLabel, showMaxLabel: true, formatter: power },
    },
    yAxis: {
      ...yAxis, gridIndex: at, type: "log", min: least, max: most,
      name: "seconds × LΔ/ε", nameLocation: "middle", nameGap: 46, nameTextStyle: text("soft", 12),
      axisLabel: { ...yAxis.axisLabel, formatter: power }, splitLine: { ...yAxis.splitLine, showMaxLine: false },
    },
  };
}

function drawn([width, height]) {
  const panels = Object.keys(figures).map(panel), all = (part) => panels.map((each) => each[part]);
  const chart = echarts.init(null, null, { renderer: "svg", ssr: true, width, height });
  chart.setOption({
    animation: false, backgroundColor: css("card"), textStyle: { fontFamily: FONT },
    title: [
      { left: 14, top: 12, text: "Time to a target against the number of workers, for S = 100", textStyle: text("ink", 17, 650) },
      ...all("title"),
    ],
    legend: { left: 14, top: 42, itemWidth: 24, itemGap: 22, icon: "roundRect", itemHeight: 4, textStyle: text("soft", 13.5), data: data.groups.map(({ name }) => name) },
    grid: all("grid"), xAxis: all("xAxis"), yAxis: all("yAxis"), series: all("series").flat(),
  });
  return chart.renderToSVGString();
}
