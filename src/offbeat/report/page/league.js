// The league's page: what is chosen, how tables are sorted, and two charts.

const off = new Set(); // families that the reader has switched off
const DASHES = ["solid", [7, 4], [2, 3], [10, 3, 2, 3], [1, 5], [14, 5]];

const familyColour = (family) => `a${data.families.indexOf(family) % 9}`;
const dashes = (() => {
  const counts = {};
  return Object.fromEntries(data.labels.map(({ name, family }) => {
    counts[family] = (counts[family] ?? -1) + 1;
    return [name, DASHES[counts[family] % DASHES.length]];
  }));
})();

const isChosen = ({ task, cluster }) => (!byId("task").value || task === byId("task").value) && (!byId("cluster").value || cluster === byId("cluster").value);
const chosenRaces = () => data.races.filter(isChosen);
const chosenLabels = () => data.labels.filter(({ family }) => !off.has(family));

// --- filters and sorting -------------------------------------------------------------------------

function filter() {
  for (const element of document.querySelectorAll("[data-task]")) element.hidden = !isChosen(element.dataset);
  for (const row of document.querySelectorAll("tr[data-family]")) row.hidden = off.has(row.dataset.family);
  const races = chosenRaces().length;
  byId("shown").textContent = races === data.races.length ? `all ${count(races, "race")}` : `${races} of ${count(data.races.length, "race")}`;
  drawLeague();
}

function keyOf(row, column) {
  const cell = row.children[column];
  if (cell.tagName === "TH" || cell.dataset.value === undefined) return cell.textContent.toLowerCase();
  return cell.dataset.value === "" ? null : Number(cell.dataset.value);
}

// What has no number is last, whichever way the others are sorted.
function compared(a, b, sign) {
  if (a === null || b === null) return (a === null) - (b === null);
  return sign * (typeof a === "string" ? a.localeCompare(b) : a - b);
}

function sort(head) {
  const table = head.closest("table"), column = head.cellIndex, up = head.ariaSort !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.ariaSort = "none";
  head.ariaSort = up ? "ascending" : "descending";
  const rows = [...table.tBodies[0].rows].map((row) => [keyOf(row, column), row]);
  rows.sort(([a], [b]) => compared(a, b, up ? 1 : -1));
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

// --- charts --------------------------------------------------------------------------------------

function profileOf(label, races) {
  const behind = races.flatMap(({ entries }) => entries.filter((entry) => entry.label === label).map((entry) => entry.behind));
  if (!behind.length || 2 * behind.length < races.length) return null; // a few races are no profile
  const places = behind.filter((each) => each !== null && each <= data.profileTo).sort((a, b) => a - b);
  const points = [[1, 0]];
  places.forEach((each, i) => points.push([each, (i + 1) / behind.length]));
  points.push([data.profileTo, places.length / behind.length]);
  return points;
}

const shareAt = (points, place) => points.filter(([x]) => x <= place * (1 + 1e-9)).at(-1)?.[1] ?? 0;

function profilesOption() {
  const races = chosenRaces().filter(({ whole }) => whole), drawn = new Map();
  for (const { name } of chosenLabels()) {
    const points = profileOf(name, races);
    if (points) drawn.set(name, points);
  }
  const familyOf = Object.fromEntries(data.labels.map(({ name, family }) => [name, family]));
  return {
    animation: false,
    textStyle: { fontFamily: FONT },
    grid: { left: 4, right: 14, top: 14, bottom: 26, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
    xAxis: axis({
      type: "log", logBase: 2, min: 1, max: data.profileTo, name: "times the seconds of the fastest", nameLocation: "middle", nameGap: 28,
      splitLine: { show: false }, axisLine: { show: true, lineStyle: { color: css("line") } }, axisLabel: { formatter: number },
    }),
    yAxis: axis({ type: "value", min: 0, max: 1, interval: 0.25, axisLabel: { formatter: percent } }),
    tooltip: {
      trigger: "axis", confine: true, ...tooltipStyle(), axisPointer: { lineStyle: { color: css("line") }, snap: false },
      formatter([{ axisValue }]) {
        const shares = [...drawn].map(([name, points]) => [name, shareAt(points, axisValue)]).sort((a, b) => b[1] - a[1]);
        const lines = shares.map(([name, share]) => `${dot(familyColour(familyOf[name]))}${escaped(name)} <b>${percent(share)}</b>`);
        return [`within ${number(Number(axisValue.toPrecision(3)))} times`, ...lines].join("<br>");
      },
    },
    series: [...drawn].map(([name, points]) => ({
      type: "line", step: "end", name, data: points, showSymbol: false, emphasis: { focus: "series" },
      lineStyle: { width: 2, color: css(familyColour(familyOf[name])), type: dashes[name] }, itemStyle: { color: css(familyColour(familyOf[name])) },
    })),
  };
}

function factorsOption() {
  const points = {};
  for (const { task, cluster, entries } of chosenRaces()) {
    for (const { label, family, throughput, efficiency } of entries) {
      if (off.has(family) || throughput === null || efficiency === null) continue;
      (points[family] ??= []).push({ value: [throughput, efficiency], about: [label, `${task} on ${cluster}`] });
    }
  }
  const values = Object.values(points).flat().map((point) => point.value);
  const reach = Math.max(1.5, ...values.flat().map((each) => Math.max(each, 1 / each))) * 1.08;
  const side = (name, extra) => axis({
    type: "log", logBase: 2, min: 1 / reach, max: reach, name, nameLocation: "middle", axisLabel: { formatter: (x) => Number(x.toPrecision(2)), showMinLabel: false, showMaxLabel: false }, ...extra,
  });
  return {
    animation: false,
    textStyle: { fontFamily: FONT },
    grid: { left: 26, right: 14, top: 14, bottom: 26, outerBoundsMode: "same", outerBoundsContain: "axisLabel" },
    xAxis: side("samples a second, over synchronous", { nameGap: 28 }),
    yAxis: side("samples needed, times fewer", { nameGap: 34 }),
    tooltip: {
      trigger: "item", confine: true, ...tooltipStyle(),
      formatter: ({ data: { value: [x, y], about: [label, race] } }) => `<b>${escaped(label)}</b><br>${escaped(race)}<br>${x.toFixed(2)} samples a second × ${y.toFixed(2)} samples needed<br>${(x * y).toFixed(2)} times as fast`,
    },
    series: [
      ...data.families.filter((family) => points[family]).map((family) => ({
        type: "scatter", name: family, data: points[family], symbolSize: 9, itemStyle: { color: css(familyColour(family)), opacity: 0.85, borderColor: css("card"), borderWidth: 1 },
      })),
      {
        type: "line", data: [[1 / reach, reach], [reach, 1 / reach]], silent: true, showSymbol: false, tooltip: { show: false }, z: 1,
        lineStyle: { color: css("soft"), type: [4, 4], width: 1 },
      },
    ],
  };
}

function drawLeague() {
  show("profiles", profilesOption());
  show("factors", factorsOption());
}

// --- begin ---------------------------------------------------------------------------------------

for (const swatch of document.querySelectorAll("[data-colour]")) swatch.style.background = `var(--${familyColour(swatch.dataset.colour)})`;
for (const id of ["task", "cluster"]) byId(id).onchange = filter;
for (const button of document.querySelectorAll("button[data-family]")) {
  button.onclick = () => {
    const { family } = button.dataset;
    if (!off.delete(family)) off.add(family);
    button.setAttribute("aria-pressed", String(!off.has(family)));
    filter();
  };
}
for (const button of document.querySelectorAll("button.sort")) button.onclick = () => sort(button.closest("th"));
themed(drawLeague);
filter();
ready();
