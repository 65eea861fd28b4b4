// The timeline: what every worker did when.
//
// A run may have hundreds of thousands of spans. ECharts is given one item per visible row, and
// each row is drawn from the columns: span by span where there is room for them, and otherwise as
// shares of the time in two pixels' width. Workers that do not fit are drawn in groups, the same way.

const LEAST_ROW = 13; // pixels
const BUCKET = 2; // pixels in which shares are taken when there is no room for spans
const MOST_HEIGHT = 620;
const AROUND = 70; // for the axis and the slider

echarts.graphic.registerShape("boxes", echarts.graphic.extendShape({
  shape: { boxes: [] },
  buildPath(path, { boxes }) {
    for (let i = 0; i < boxes.length; i += 4) path.rect(boxes[i], boxes[i + 1], boxes[i + 2], boxes[i + 3]);
  },
}));

// --- columns: see columns.py -----------------------------------------------------------------

async function unpacked(run) {
  const deflated = Uint8Array.from(atob(run.columns), (letter) => letter.charCodeAt(0));
  const stream = new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  let at = 0;
  const take = (count) => new Int32Array(buffer, 4 * at, ((at += count), count));
  const timed = (count) => {
    const counts = take(run.workers), gaps = take(count), lengths = take(count);
    const first = new Int32Array(run.workers + 1);
    const starts = new Float64Array(count), ends = new Float64Array(count);
    for (let rank = 0, i = 0; rank < run.workers; rank++) {
      for (let end = 0, stop = i + counts[rank]; i < stop; i++) {
        const start = end + gaps[i];
        end = start + lengths[i];
        starts[i] = start * run.tick_s;
        ends[i] = end * run.tick_s;
      }
      first[rank + 1] = i;
    }
    return { first, starts, ends, notes: take(count) };
  };
  const spans = timed(run.spans), lanes = timed(run.lanes);
  const [numbers, samples, workers, staleness] = [0, 1, 2, 3].map(() => take(run.rounds));
  const rounds = new Map();
  numbers.forEach((number, i) => rounds.set(number, { samples: samples[i], workers: workers[i], staleness: staleness[i] }));
  return { ...run, spans, lanes, rounds, states: new Uint8Array(buffer, 4 * at) };
}

// The first span of a worker that ends after this moment.
function firstAfter({ first, ends }, rank, moment) {
  let low = first[rank], high = first[rank + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[middle] > moment) high = middle;
    else low = middle + 1;
  }
  return low;
}

// The span that a worker is in at this moment, or -1.
function spanAt(columns, rank, moment) {
  const i = firstAfter(columns, rank, moment);
  return i < columns.first[rank + 1] && columns.starts[i] <= moment ? i : -1;
}

// --- drawing ---------------------------------------------------------------------------------

// What is visible, in pixels, seconds and workers.
function viewOf(run, params, api) {
  const { x, y, width, height } = params.coordSys;
  const [left, top] = api.coord([0, 0]), [right, bottom] = api.coord([1, 1]);
  const perSecond = right - left, perWorker = bottom - top;
  const from = (x - left) / perSecond;
  const first = Math.max(0, Math.floor((y - top) / perWorker + 1e-6));
  const last = Math.min(run.workers, Math.ceil((y + height - top) / perWorker - 1e-6));
  const size = Math.ceil((last - first) / Math.max(1, Math.floor(height / LEAST_ROW)));
  return {
    x, y, width, height, from, to: from + width / perSecond, perSecond, first, last, size,
    pixel: (moment) => left + moment * perSecond,
    line: (worker) => top + worker * perWorker,
  };
}

function rowOf(view, slot) {
  const low = view.first + slot * view.size;
  if (low >= view.last) return null;
  const high = Math.min(low + view.size, view.last);
  const top = view.line(low), space = view.line(high) - top;
  const lane = view.size === 1 && space >= 16 ? Math.min(5, space * 0.16) : 0;
  const gap = Math.min(8, space * 0.2);
  return { low, high, top: top + gap / 2, height: space - gap - lane, lane, middle: top + space / 2 };
}

function exactBoxes({ spans, states }, view, row, first, last) {
  const boxes = states5();
  for (let i = first; i < last; i++) {
    const begin = Math.max(view.pixel(spans.starts[i]), view.x - 2);
    const width = Math.min(view.pixel(spans.ends[i]), view.x + view.width + 2) - begin;
    // A hair between neighbours, where there is room for one: two steps are two boxes.
    boxes[states[i]].push(begin, row.top, width > 4 ? width - 0.7 : Math.max(width, 0.5), row.height);
  }
  return boxes;
}

function sharedBoxes({ spans, states }, view, row) {
  const count = Math.ceil(view.width / BUCKET), perBucket = BUCKET / view.perSecond;
  const sums = data.states.map(() => new Float64Array(count));
  for (let rank = row.low; rank < row.high; rank++) {
    for (let i = firstAfter(spans, rank, view.from); i < spans.first[rank + 1] && spans.starts[i] < view.to; i++) {
      const begin = Math.max(0, (spans.starts[i] - view.from) / perBucket);
      const end = Math.min(count, (spans.ends[i] - view.from) / perBucket);
      const sum = sums[states[i]];
      let bucket = Math.floor(begin);
      if (end <= bucket + 1) {
        if (bucket < count) sum[bucket] += end - begin;
        continue;
      }
      sum[bucket] += bucket + 1 - begin;
      for (bucket++; bucket + 1 <= end; bucket++) sum[bucket] += 1;
      if (bucket < count) sum[bucket] += end - bucket;
    }
  }
  const boxes = states5(), scale = row.height / (row.high - row.low);
  for (let bucket = 0; bucket < count; bucket++) {
    let bottom = row.top + row.height;
    const width = Math.min(BUCKET, view.width - bucket * BUCKET);
    for (let state = 0; state < sums.length; state++) {
      const height = sums[state][bucket] * scale;
      if (height < 0.05) continue;
      bottom -= height;
      boxes[state].push(Math.round(view.x) + bucket * BUCKET, bottom, width, height);
    }
  }
  return boxes;
}

function laneBoxes({ lanes }, view, row) {
  const boxes = [], top = row.top + row.height + 1;
  let begin = -Infinity, end = -Infinity;
  const close = () => end > begin && boxes.push(begin, top, Math.max(end - begin, 0.8), row.lane - 1);
  for (let i = firstAfter(lanes, row.low, view.from); i < lanes.first[row.low + 1] && lanes.starts[i] < view.to; i++) {
    const left = Math.max(view.pixel(lanes.starts[i]), view.x), right = Math.min(view.pixel(lanes.ends[i]), view.x + view.width);
    if (left - end < 1) {
      end = Math.max(end, right);
      continue;
    }
    close();
    [begin, end] = [left, right];
  }
  close();
  return boxes;
}

const states5 = () => data.states.map(() => []);

function drawnRow(run, view, slot) {
  const row = rowOf(view, slot);
  if (!row) return null;
  let boxes = null;
  if (row.high - row.low === 1) {
    const first = firstAfter(run.spans, row.low, view.from);
    let last = first;
    while (last < run.spans.first[row.low + 1] && run.spans.starts[last] < view.to && last - first <= view.width) last++;
    if (last - first <= view.width / 2) boxes = exactBoxes(run, view, row, first, last);
  }
  boxes ??= sharedBoxes(run, view, row);
  const children = boxes.map((shape, state) => ({
    type: "boxes", shape: { boxes: shape }, style: { fill: css(data.states[state]) }, silent: true,
  }));
  children.push({ type: "boxes", shape: { boxes: row.lane ? laneBoxes(run, view, row) : [] }, style: { fill: css("lane") }, silent: true });
  // What the pointer meets: the whole row.
  const whole = { x: view.x, y: row.top, width: view.width, height: row.height + row.lane };
  children.push({ type: "rect", shape: whole, style: { fill: "rgba(0,0,0,0)" } });
  return { type: "group", children };
}

function drawnLabel(run, view, slot) {
  const row = rowOf(view, slot);
  if (!row || row.middle < view.y || row.middle > view.y + view.height) return null;
  const one = row.high - row.low === 1;
  const style = { y: row.middle, verticalAlign: "middle", fill: css("soft"), font: `12px ${FONT}` };
  const shares = [];
  for (let rank = row.low; rank < row.high; rank++) if (rank in run.utilization) shares.push(run.utilization[rank]);
  const mean = shares.reduce((sum, share) => sum + share, 0) / shares.length;
  const name = one ? `${row.low}` : `${row.low}–${row.high - 1}`;
  return {
    type: "group",
    children: [
      { type: "text", style: { ...style, x: view.x - 8, align: "right", text: name } },
      { type: "text", style: { ...style, x: view.x + view.width + 8, align: "left", text: shares.length ? percent(mean) : "" } },
    ],
  };
}

function drawnLoss(run, view, slot) {
  const x = view.pixel(run.losses[slot].at_s);
  const shape = { x1: x, y1: view.y, x2: x, y2: view.y + view.height };
  return { type: "line", shape, style: { stroke: css("dropped"), lineWidth: 1.5, lineDash: [4, 3] } };
}

// --- what the pointer is on --------------------------------------------------------------------

function told(run, chart, pointer) {
  const [moment, line] = chart.convertFromPixel({ gridIndex: 0 }, pointer);
  const worker = Math.floor(line);
  if (!(worker >= 0 && worker < run.workers && moment >= 0)) return "";
  const row = chart.offbeatRows?.find((each) => each && worker >= each.low && worker < each.high);
  const when = `${data.seconds}`;
  if (row && row.high - row.low > 1) {
    const counts = data.states.map(() => 0);
    for (let rank = row.low; rank < row.high; rank++) {
      const i = spanAt(run.spans, rank, moment);
      if (i >= 0) counts[run.states[i]]++;
    }
    const lines = counts.map((count, state) => count && `${dot(data.states[state])}${count} ${data.states[state]}`).filter(Boolean);
    return `<b>workers ${row.low} to ${row.high - 1}</b> at ${seconds(moment)} ${when}<br>${lines.join("<br>") || "nothing recorded"}`;
  }
  const i = spanAt(run.spans, worker, moment), parts = [];
  if (i >= 0) {
    const state = data.states[run.states[i]], note = run.spans.notes[i];
    const [from, to] = [run.spans.starts[i], run.spans.ends[i]];
    parts.push(`${dot(state)}<b>${state}</b> for ${seconds(to - from)} ${when}`, `${seconds(from)} to ${seconds(to)}`);
    if (run.states[i] < 4) parts.push(`${count(note, "sample")}`);
    else parts.push(note < 0 ? "ended by no round" : `until round ${note}${roundFacts(run, note)}`);
  } else parts.push(`nothing recorded at ${seconds(moment)} ${when}`);
  const lane = spanAt(run.lanes, worker, moment);
  if (lane >= 0 && (i < 0 || run.states[i] < 4)) {
    const number = run.lanes.notes[lane];
    parts.push(`in the background: round ${number}${roundFacts(run, number)}`);
  }
  return `<b>worker ${worker}</b><br>${parts.join("<br>")}`;
}

function roundFacts(run, number) {
  const facts = run.rounds.get(number);
  if (!facts) return "";
  const stale = facts.staleness ? `, ${count(facts.staleness, "round")} stale` : "";
  return `: ${count(facts.samples, "sample")} of ${count(facts.workers, "worker")}${stale}`;
}

// --- the chart -------------------------------------------------------------------------------

function timelineHeight(run) {
  return Math.min(MOST_HEIGHT, Math.max(120, run.workers * 34)) + AROUND;
}

function timelineOption(run, chart, pointer) {
  const narrow = chart.getWidth() < 560, many = run.workers > 12;
  const plot = timelineHeight(run) - AROUND;
  const slots = Math.min(run.workers, Math.floor(plot / LEAST_ROW) + 1);
  const items = Array.from({ length: slots }, () => [0, 0]);
  const draw = (drawn) => (params, api) => {
    const view = (params.context.view ??= viewOf(run, params, api));
    return drawn(run, view, params.dataIndex);
  };
  const remembered = (of, view, slot) => {
    if (slot === 0) chart.offbeatRows = [];
    chart.offbeatRows[slot] = rowOf(view, slot);
    return drawnRow(of, view, slot);
  };
  const series = { type: "custom", data: items, encode: { x: 0, y: 1 }, animation: false, coordinateSystem: "cartesian2d" };
  const slider = {
    type: "slider", filterMode: "none", showDetail: false, showDataShadow: false, brushSelect: false,
    borderColor: css("line"), fillerColor: css("faint"), backgroundColor: "transparent", handleSize: "110%",
    moveHandleStyle: { color: css("line") }, handleStyle: { color: css("card"), borderColor: css("soft") },
    emphasis: { handleStyle: { borderColor: css("accent") }, moveHandleStyle: { color: css("soft") } },
  };
  return {
    animation: false,
    textStyle: { fontFamily: FONT },
    grid: { left: many ? 104 : 34, right: narrow ? 44 : 52, top: 8, height: plot, outerBoundsMode: "none" },
    xAxis: {
      type: "value", min: 0, max: run.seconds || 1, position: "bottom",
      axisLine: { onZero: false, lineStyle: { color: css("line") } }, axisTick: { show: true, lineStyle: { color: css("line") } },
      splitLine: { show: false }, splitNumber: narrow ? 4 : 9,
      axisLabel: { color: css("soft"), showMinLabel: true, showMaxLabel: false, hideOverlap: true, formatter: (value) => `${number(value)} s` },
    },
    yAxis: { type: "value", min: 0, max: run.workers, inverse: true, axisLabel: { show: false }, splitLine: { show: false }, axisLine: { show: false }, axisTick: { show: false } },
    dataZoom: [
      { type: "inside", xAxisIndex: 0, filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true, moveOnMouseWheel: false, preventDefaultMouseMove: false, minSpan: 0.001 },
      { ...slider, xAxisIndex: 0, height: 18, top: plot + 42, minSpan: 0.001 },
      ...(many ? [{ ...slider, yAxisIndex: 0, width: 14, left: 6, minSpan: Math.min(100, 400 / run.workers) }] : []),
    ],
    tooltip: { trigger: "item", confine: true, formatter: () => told(run, chart, pointer.at), ...tooltipStyle() },
    series: [
      { ...series, id: "spans", clip: true, renderItem: draw(remembered) },
      { ...series, id: "losses", data: run.losses.map((each) => [each.at_s, 0]), clip: true, silent: true, tooltip: { show: false }, renderItem: draw(drawnLoss) },
      { ...series, id: "labels", clip: false, silent: true, tooltip: { show: false }, renderItem: draw(drawnLabel) },
    ],
  };
}
