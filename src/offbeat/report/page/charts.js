// The other charts: learning curves, how time was spent, staleness.

// Seconds with as many digits as tell two events apart.
const seconds = (value) => (Math.abs(value) >= 0.1 || value === 0 ? value.toFixed(4) : Number(value.toPrecision(4)).toString());

// The synchronous one is what the others are measured by: it is grey.
const colourNames = (() => {
  let next = 0;
  return data.groups.map((group) => (group.synchronous ? "a0" : `a${(next++ % 8) + 1}`));
})();

// There are eight colours: who has one for the second time is dashed, for the third time dotted.
const dashes = colourNames.map((name, i) => ["solid", "dashed", "dotted"][Math.min(colourNames.slice(0, i).filter((other) => other === name && name !== "a0").length, 2)]);
const swatchOf = (i) => {
  const colour = `var(--${colourNames[i]})`, part = { solid: 5, dashed: 3, dotted: 1 }[dashes[i]];
  return part === 5 ? colour : `repeating-linear-gradient(90deg, ${colour} 0 ${part}px, transparent ${part}px ${part === 3 ? 4 : 3}px)`;
};

function band(name, colour, [x, , low, high]) {
  return {
    type: "custom", name, data: [[x[0], Math.min(...low)], [x.at(-1), Math.max(...high)]], silent: true, clip: true, z: 1, animation: false, tooltip: { show: false },
    renderItem(params, api) {
      if (params.dataIndex) return null; // the second item only makes room for the highest
      const there = x.map((place, i) => api.coord([place, high[i]]));
      const back = x.map((place, i) => api.coord([place, low[i]])).reverse();
      return { type: "polygon", shape: { points: [...there, ...back] }, style: { fill: colour, opacity: 0.14 } };
    },
  };
}

// The mean of a curve at a place between its first and its last point, or null.
function valueAt([x, mean], place) {
  const after = x.findIndex((each) => each >= place);
  if (after < 0 || (after === 0 && x[0] > place)) return null;
  if (after === 0) return mean[0];
  return mean[after - 1] + ((mean[after] - mean[after - 1]) * (place - x[after - 1])) / (x[after] - x[after - 1]);
}

function curveOption(id, hidden) {
  const [value, against] = id.split("-"), timed = against === "at_s", share = value === "accuracy";
  const series = [];
  let any = false;
  data.groups.forEach(({ name, curves }, i) => {
    const curve = curves[id];
    if (!curve) return;
    any = true;
    if (hidden.has(i)) return;
    const colour = css(colourNames[i]);
    series.push({
      type: "line", name, data: curve[0].map((x, at) => [x, curve[1][at]]), showSymbol: curve[0].length === 1, symbolSize: 6,
      lineStyle: { width: 2, color: colour, type: dashes[i] }, itemStyle: { color: colour }, z: 3, emphasis: { disabled: true },
    });
    if (curve[2] !== undefined && curve[2].some((low, at) => low !== curve[3][at])) series.push(band(name, colour, curve));
  });
  if (!any) return null;
  if (value in data.target && series.length) {
    series[0].markLine = {
      silent: true, symbol: "none", data: [{ yAxis: data.target[value] }],
      lineStyle: { color: css("soft"), type: [4, 4] },
      label: { position: "insideStartTop", color: css("soft"), formatter: "target", fontFamily: FONT },
    };
  }
  const y = share ? (x) => percent(x) : (x) => number(x);
  return {
    animation: false,
    textStyle: { fontFamily: FONT },
    grid: { left: 4, right: 14, top: 14, bottom: 24, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
    xAxis: axis({
      type: "value", name: timed ? data.seconds : "samples", nameLocation: "middle", nameGap: 28, min: 0, max: "dataMax",
      splitLine: { show: false }, axisLine: { show: true, lineStyle: { color: css("line") } },
      splitNumber: 5, axisLabel: { formatter: number, showMaxLabel: false },
    }),
    yAxis: axis({ type: "value", max: share ? 1 : null, min: share ? null : 0, scale: share, splitNumber: 4, axisLabel: { formatter: y } }),
    tooltip: {
      trigger: "axis", confine: true, ...tooltipStyle(), axisPointer: { lineStyle: { color: css("line") } },
      formatter([{ axisValue }]) {
        const at = timed ? `${number(Number(axisValue.toPrecision(4)))} ${data.seconds}` : count(Math.round(axisValue), "sample");
        const lines = data.groups.map(({ name, curves }, i) => {
          const there = hidden.has(i) || !curves[id] ? null : valueAt(curves[id], axisValue);
          if (there === null) return "";
          return `${dot(colourNames[i])}${escaped(name)} <b>${share ? `${(100 * there).toFixed(1)} %` : there.toFixed(4)}</b>`;
        });
        return [`at ${at}`, ...lines.filter(Boolean)].join("<br>");
      },
    },
    series,
  };
}

function sharesOption(narrow) {
  if (!data.groups.some((group) => group.shares.some((share) => share > 0))) return null;
  const groups = [...data.groups].reverse();
  return {
    animation: false,
    textStyle: { fontFamily: FONT },
    grid: { left: 4, right: 18, top: 8, bottom: 4, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
    xAxis: axis({ type: "value", max: 1, splitLine: { show: false }, axisLabel: { formatter: percent } }),
    yAxis: axis({ type: "category", data: groups.map((group) => group.name), axisLabel: { color: css("ink"), width: narrow ? 92 : 150, overflow: "truncate", lineHeight: 13, formatter: (name) => name.replace(/[:,]/g, "$&\n") } }),
    tooltip: {
      trigger: "axis", axisPointer: { type: "shadow" }, confine: true, ...tooltipStyle(),
      formatter: (found) => [`<b>${escaped(found[0].name)}</b>`, ...found.filter((each) => each.value).map((each) => `${each.marker}${each.seriesName} <b>${(100 * each.value).toFixed(1)} %</b>`)].join("<br>"),
    },
    series: data.states.map((state, i) => ({
      type: "bar", name: state, stack: "time", barMaxWidth: 26, data: groups.map((group) => group.shares[i]),
      itemStyle: { color: css(state) }, emphasis: { disabled: true },
      label: {
        show: true, fontSize: 12, fontFamily: FONT, color: css(state === "waiting" ? "soft" : "on-state"),
        formatter: ({ value }) => (value >= (narrow ? 0.14 : 0.09) ? percent(value) : ""),
      },
    })),
  };
}

function stalenessOption(hidden) {
  const most = Math.max(-1, ...data.groups.flatMap((group) => Object.keys(group.staleness).map(Number)));
  if (most < 0) return null;
  const places = Array.from({ length: most + 1 }, (_, i) => i);
  return {
    animation: false,
    textStyle: { fontFamily: FONT },
    grid: { left: 4, right: 14, top: 14, bottom: 24, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
    xAxis: axis({ type: "category", data: places.map(String), name: "rounds", nameLocation: "middle", nameGap: 28, axisLine: { show: true, lineStyle: { color: css("line") } } }),
    yAxis: axis({ type: "value", max: 1, interval: 0.25, axisLabel: { formatter: percent } }),
    tooltip: {
      trigger: "axis", axisPointer: { type: "shadow" }, confine: true, ...tooltipStyle(),
      formatter: (found) => [`<b>${count(Number(found[0].name), "round")} stale</b>`, ...found.map((each) => `${each.marker}${escaped(each.seriesName)} <b>${(100 * each.value).toFixed(1)} %</b> of its rounds`)].join("<br>"),
    },
    series: data.groups.map((group, i) => ({
      type: "bar", name: group.name, barMaxWidth: 22, barGap: "12%", data: hidden.has(i) ? [] : places.map((place) => group.staleness[place] ?? 0),
      itemStyle: { color: css(colourNames[i]), borderRadius: [2, 2, 0, 0] }, emphasis: { disabled: true },
    })),
  };
}
