// The page of a federated comparison: what was remembered, what was kept, and the timeline.

// Accuracy over all classes so far, after each task.
function afterOption() {
  const series = [];
  data.afterTask.forEach((curve, i) => {
    if (!curve || hidden.has(i)) return;
    const name = data.groups[i].name, colour = css(colourNames[i]);
    series.push({
      type: "line", name, data: curve[0].map((x, at) => [x, curve[1][at]]), symbolSize: 7, symbol: "circle",
      lineStyle: { width: 2, color: colour, type: dashes[i] }, itemStyle: { color: colour }, z: 3, emphasis: { disabled: true },
    });
    if (curve[0].length > 1 && curve[2].some((low, at) => low !== curve[3][at])) series.push(band(name, colour, curve));
  });
  const last = Math.max(1, ...data.afterTask.filter(Boolean).map((curve) => curve[0].length));
  return {
    animation: false,
    textStyle: { fontFamily: FONT },
    grid: { left: 4, right: 14, top: 14, bottom: 24, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
    xAxis: axis({
      type: "value", name: "after task", nameLocation: "middle", nameGap: 28, min: Math.min(1, last - 0.5), max: last, interval: 1,
      splitLine: { show: false }, axisLine: { show: true, lineStyle: { color: css("line") } },
    }),
    yAxis: axis({ type: "value", min: 0, max: 1, interval: 0.25, axisLabel: { formatter: percent } }),
    tooltip: {
      trigger: "axis", confine: true, ...tooltipStyle(), axisPointer: { lineStyle: { color: css("line") }, snap: true },
      formatter([{ axisValue }]) {
        const at = Math.round(axisValue) - 1;
        const lines = data.afterTask.map((curve, i) => {
          if (!curve || hidden.has(i) || curve[1][at] === undefined) return "";
          return `${dot(colourNames[i])}${escaped(data.groups[i].name)} <b>${(100 * curve[1][at]).toFixed(1)} %</b>`;
        });
        return [`after task ${at + 1}`, ...lines.filter(Boolean)].join("<br>");
      },
    },
    series,
  };
}

// What the buffers of all clients hold, class by class.
function bufferOption() {
  const buffer = data.buffers[byId("seed").value];
  if (!buffer || !buffer.kept.some(Boolean)) return null;
  const { classes, kept } = buffer;
  const shown = kept.map((counts, i) => ({ counts, i })).filter(({ counts, i }) => counts && !hidden.has(i));
  return {
    animation: false,
    textStyle: { fontFamily: FONT },
    grid: { left: 4, right: 14, top: 14, bottom: 24, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
    xAxis: axis({
      type: "category", data: classes.map(([task, kind]) => `${kind}\n(${task})`), name: "class (task)", nameLocation: "middle", nameGap: 42,
      axisLine: { show: true, lineStyle: { color: css("line") } }, axisLabel: { interval: 0, lineHeight: 14 },
    }),
    yAxis: axis({ type: "value", min: 0, minInterval: 1, axisLabel: { formatter: number } }),
    tooltip: {
      trigger: "axis", axisPointer: { type: "shadow", shadowStyle: { color: css("faint"), opacity: 0.5 } }, confine: true, ...tooltipStyle(),
      formatter(found) {
        const [task, kind] = classes[found[0].dataIndex];
        const lines = found.map((each) => `${each.marker}${escaped(each.seriesName)} <b>${count(each.value, "sample")}</b>`);
        return [`class ${kind}, of task ${task}`, ...lines].join("<br>");
      },
    },
    series: shown.map(({ counts, i }) => ({
      type: "bar", name: data.groups[i].name, data: counts, barMaxWidth: 18, barGap: "8%",
      itemStyle: { color: css(colourNames[i]), borderRadius: [2, 2, 0, 0] }, emphasis: { disabled: true },
    })),
  };
}

function drawCharts() {
  byId("shares").style.height = `${Math.max(220, 44 * data.groups.length + 40)}px`;
  show("after", afterOption());
  show("buffer", bufferOption());
  show("accuracy-at_s", curveOption("accuracy-at_s", hidden));
  show("shares", sharesOption(innerWidth < 560));
}

function redraw() {
  drawCharts();
  if (shownRun) drawTimeline();
}

stateLegend();
groupLegend(drawCharts);
byId("seed").onchange = drawCharts;
byId("seed").hidden = byId("seed").options.length < 2;
themed(redraw);
timelineTools().then(ready);
