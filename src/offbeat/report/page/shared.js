"use strict";

const data = JSON.parse(document.getElementById("data").textContent);

// What every page has: its data, its charts, light and dark.

const byId = (id) => document.getElementById(id);
const charts = new Map();

function chartOf(id) {
  if (!charts.has(id)) charts.set(id, echarts.init(byId(id), null, { renderer: "canvas" }));
  return charts.get(id);
}

function show(id, option) {
  const element = byId(id);
  if (!option) {
    element.className = "empty";
    element.textContent = "not in these records";
    return;
  }
  chartOf(id).setOption(option, { notMerge: true });
}

// --- light and dark, narrow and wide ------------------------------------------------------------

const system = matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = null; // what the reader has chosen, or null for what the system says

// Draws now, and again whenever colours or the width have changed.
function themed(redraw) {
  const apply = () => {
    const theme = chosenTheme ?? (system.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    byId("theme").textContent = theme === "dark" ? "light" : "dark";
    redraw();
  };
  apply();
  system.onchange = apply;
  byId("theme").onclick = () => {
    chosenTheme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    apply();
  };
  let resizing = 0;
  addEventListener("resize", () => {
    cancelAnimationFrame(resizing);
    resizing = requestAnimationFrame(() => {
      for (const chart of charts.values()) chart.resize();
      redraw();
    });
  });
}

// Two frames later it is on the screen: says how long that took since the page was asked for.
function ready() {
  const told = () => (document.documentElement.dataset.ready = String(Math.round(performance.now())));
  requestAnimationFrame(() => requestAnimationFrame(told));
}
