// Draws what theory_curves.py has found; `data`, `figures`, SUBTEXTS and the report's charts.js are there.

const WIDE = new Set(["m-synchronous, best m", "optimal"]);
const PANEL = { left: [66, 532], top: [122, 492], width: 406, height: 240 };
const text = (colour, fontSize, fontWeight = 400) => ({ color: css(colour), fontSize, fontWeight, fontFamily: FONT });
const log = (value) => (Number.isInteger(Math.log10(value)) ? number(value) : "");

// A line that goes no further down: wide, under the thin ones that it has come along with.
function widen(line, reached, colour) {
  Object.assign(line, { z: 2, lineStyle: { width: 7, color: colour, opacity: 0.45, cap: "round" } });
  line.markPoint = {
    symbol: "circle", symbolSize: 9, silent: true,
    itemStyle: { color: colour, borderColor: css("card"), borderWidth: 1.5 },
    data: [{
      coord: reached,
      label: { show: true, formatter: `m = ${number(reached[0])}`, position: reached[0] < 300 ? [5, 12] : [-58, 12], ...text("ink", 12.5, 600), color: colour },
    }],
  };
}

// The report's chart of one profile, on logarithmic axes.
function panel(name, at) {
  const { series, xAxis, yAxis } = curveOption(`${at}-n`, new Set());
  const left = PANEL.left[at % 2], top = PANEL.top[at >> 1];
  const highest = Math.max(...series.flatMap((line) => line.data.map(([, y]) => y)));
  for (const line of series) {
    Object.assign(line, { xAxisIndex: at, yAxisIndex: at });
    if (WIDE.has(line.name)) widen(line, line.data.find(([n]) => n === figures[name].m[line.name]), line.itemStyle.color);
  }
  return {
    series,
    grid: { left, top, width: PANEL.width, height: PANEL.height },
    title: { left: left - 6, top: top - 46, text: `τᵢ = ${name}`, subtext: SUBTEXTS[at], itemGap: 3, textStyle: text("ink", 15, 600), subtextStyle: text("soft", 12.5) },
    xAxis: {
      ...xAxis, gridIndex: at, type: "log", min: 1, max: 1000,
      name: at > 1 ? "workers, the fastest first" : "", axisLabel: { ...xAxis.axisLabel, showMaxLabel: true, formatter: log },
    },
    yAxis: {
      ...yAxis, gridIndex: at, type: "log", min: at < 2 ? 1 : 10, max: 10 ** Math.ceil(Math.log10(highest)),
      name: "seconds × LΔ/ε", nameLocation: "middle", nameGap: 40, nameTextStyle: text("soft", 12),
      axisLabel: { ...yAxis.axisLabel, formatter: log },
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
