// The report's page: puts the charts into it.

const CURVES = ["accuracy-at_s", "accuracy-samples", "loss-at_s", "loss-samples"];

function drawCharts() {
  const narrow = innerWidth < 560;
  byId("learning").hidden = !data.groups.some((group) => Object.keys(group.curves).length);
  byId("shares").style.height = byId("staleness").style.height = `${Math.max(220, 44 * data.groups.length + 40)}px`;
  for (const id of CURVES) show(id, curveOption(id, hidden));
  show("shares", sharesOption(narrow));
  show("staleness", stalenessOption(hidden));
}

function redraw() {
  drawCharts();
  if (shownRun) drawTimeline();
}

stateLegend();
groupLegend(drawCharts);
themed(redraw);
timelineTools().then(ready);
