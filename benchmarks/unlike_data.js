// Draws what unlike_data.py has found; `data`, `figures` and the report's charts.js are there.

const text = (colour, fontSize, fontWeight = 400) => ({ color: css(colour), fontSize, fontWeight, fontFamily: FONT });

// Powers of ten alone.
function power(value) {
  const exponent = Math.log10(value);
  if (Math.abs(exponent - Math.round(exponent)) > 1e-9) return "";
  return exponent < 0 ? value.toFixed(-Math.round(exponent)) : number(value);
}

// Where each worker counts as often as it comes.
function frequency(level) {
  return {
    silent: true, symbol: "none", data: [{ yAxis: level }], lineStyle: { color: css("soft"), type: [4, 4] },
    label: { position: "insideEndBottom", formatter: "each counts as often as it comes", ...text("soft", 12.5) },
  };
}

function drawn([width, height]) {
  const { series, xAxis, yAxis } = curveOption("distance-at_s", new Set());
  series[0].markLine = frequency(figures.frequency);
  const chart = echarts.init(null, null, { renderer: "svg", ssr: true, width, height });
  chart.setOption({
    animation: false, backgroundColor: css("card"), textStyle: { fontFamily: FONT },
    title: { left: 14, top: 12, text: "Distance to the optimum of all data, from 1 at the start", textStyle: text("ink", 17, 650) },
    legend: { left: 14, top: 42, itemWidth: 24, itemGap: 22, icon: "roundRect", itemHeight: 4, textStyle: text("soft", 13.5), data: data.groups.map(({ name }) => name) },
    grid: { left: 70, top: 84, width: width - 100, height: height - 140 },
    xAxis: { ...xAxis, axisLabel: { ...xAxis.axisLabel, showMaxLabel: true } },
    yAxis: { ...yAxis, type: "log", min: figures.least, max: 1, axisLabel: { ...yAxis.axisLabel, formatter: power } },
    series,
  });
  return chart.renderToSVGString();
}
