// The run that is looked at: its timeline, and what the legends switch off.

const hidden = new Set(); // groups that the reader has switched off

// --- the timeline ------------------------------------------------------------------------------

const pointer = { at: [0, 0] };
const unpackedRuns = new Map();
let shownRun = null;

function timelineChart() {
  const fresh = !charts.has("timeline"), chart = chartOf("timeline");
  // Before the tooltip listens, so that it is told where the pointer is now.
  if (fresh) chart.getZr().on("mousemove", (event) => (pointer.at = [event.offsetX, event.offsetY]));
  return chart;
}

async function showRun(index) {
  if (!("DecompressionStream" in window)) {
    byId("hint").textContent = "The timeline needs a browser of 2023 or later.";
    return;
  }
  if (!unpackedRuns.has(index)) unpackedRuns.set(index, unpacked(data.runs[index]));
  const run = await unpackedRuns.get(index);
  if (Number(byId("run").value) !== index) return; // another was chosen meanwhile
  shownRun = run;
  byId("timeline").style.height = `${timelineHeight(run)}px`;
  const chart = timelineChart();
  chart.resize();
  drawTimeline();
  showLosses(run);
  const grouped = run.workers > 12 ? " Zoom with the slider on the left to see workers one by one." : "";
  byId("hint").textContent = `Rows are workers, with their utilisation on the right. Ctrl and the wheel, or two fingers, zoom; drag to move.${grouped}`;
}

function showLosses(run) {
  byId("losses").replaceChildren(...run.losses.map(({ at_s, words }) => {
    const line = document.createElement("li");
    line.textContent = `${seconds(at_s)} ${data.seconds}: ${words}`;
    return line;
  }));
}

function drawTimeline() {
  const chart = timelineChart(), zoom = chart.getOption()?.dataZoom?.map(({ start, end }) => ({ start, end }));
  const option = timelineOption(shownRun, chart, pointer);
  if (chart.offbeatRun === shownRun) zoom?.forEach((range, i) => Object.assign(option.dataZoom[i] ?? {}, range));
  chart.offbeatRun = shownRun;
  chart.setOption(option, { notMerge: true });
}

function zoomBy(factor) {
  const chart = timelineChart(), { start, end } = chart.getOption().dataZoom[0];
  const middle = (start + end) / 2, half = factor === "all" ? 50 : Math.min(50, ((end - start) / 2) * Number(factor));
  const from = factor === "all" ? 0 : Math.max(0, Math.min(100 - 2 * half, middle - half));
  chart.dispatchAction({ type: "dataZoom", dataZoomIndex: 0, start: from, end: from + 2 * half });
  if (factor === "all" && shownRun.workers > 12) chart.dispatchAction({ type: "dataZoom", dataZoomIndex: 2, start: 0, end: 100 });
}

// Answers to the selector and to the buttons for the zoom; is done when the first run is drawn.
function timelineTools() {
  byId("run").onchange = (event) => showRun(Number(event.target.value));
  for (const button of document.querySelectorAll("[data-zoom]")) button.onclick = () => zoomBy(button.dataset.zoom);
  return showRun(Number(byId("run").value));
}

// --- legends ----------------------------------------------------------------------------------

function stateLegend() {
  const item = (name, text, more = "") => `<li><i class="swatch ${more}" style="background:var(--${name})"></i>${text}</li>`;
  byId("states").innerHTML = data.states.map((state) => item(state, state)).join("") + item("lane", "round in the background", "lane");
}

// Buttons that switch groups off and on; `drawn` is called when one was pressed.
function groupLegend(drawn) {
  data.groups.forEach((group, i) => {
    const entry = document.createElement("li"), button = document.createElement("button");
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    button.innerHTML = `<i class="swatch" style="background:${swatchOf(i)}"></i>${escaped(group.name)}`;
    button.onclick = () => {
      if (!hidden.delete(i)) hidden.add(i);
      button.setAttribute("aria-pressed", String(!hidden.has(i)));
      drawn();
    };
    entry.append(button);
    byId("algorithms").append(entry);
  });
  for (const swatch of document.querySelectorAll("[data-group]")) swatch.style.background = swatchOf(Number(swatch.dataset.group));
}
