"use strict";
// The timeline may have many more spans than pixels: those that lie nearer than a pixel are drawn
// as one bar, as high as the part of its time that they take. What is zoomed to is drawn anew.
const MAX_BARS = 9000;
const PIXELS = 1600;

// Spans of each kind as rows by device, in order of their start.
function rowsOf(timeline) {
  return Object.entries(timeline.kinds).map(([kind, [devices, operators, starts, lengths]]) => {
    const rows = timeline.devices.map(() => []);
    devices.forEach((device, k) => rows[device].push([starts[k] / 1e6, (starts[k] + lengths[k]) / 1e6, operators[k]]));
    rows.forEach((row) => row.sort((a, b) => a[0] - b[0]));
    return { kind, rows };
  });
}

// Joins spans of one row and direction that lie nearer to each other than `near`.
function joined(row, from, to, near, forward) {
  const found = [];
  for (const [start, end, operator] of row) {
    if (end < from || start > to) continue;
    const last = found.at(-1);
    const short = last && (end - start < near || last.end - last.start < near);
    if (short && start - last.end < near && last.operator < forward === operator < forward) {
      last.end = Math.max(last.end, end);
      last.busy += end - start;
      last.count += 1;
    } else found.push({ start, end, operator, busy: end - start, count: 1 });
  }
  return found;
}

function barsIn(timeline, kinds, from, to) {
  let near = (to - from) / PIXELS;
  for (;;) {
    const found = kinds.map(({ kind, rows }) => ({
      kind, rows: rows.map((row) => joined(row, from, to, near, timeline.forward)),
    }));
    const count = found.reduce((sum, { rows }) => sum + rows.reduce((n, row) => n + row.length, 0), 0);
    if (count <= MAX_BARS) return found;
    near *= 1.5;
  }
}

const ms = (x) => x.toPrecision(5);

function traceOf(timeline, { kind, rows }) {
  const computing = kind === "computes" || kind === "waits for halos";
  const trace = {
    type: "bar", orientation: "h", name: kind, x: [], y: [], base: [], width: [], text: [], showlegend: false,
    textposition: "none", hovertemplate: "%{text}<extra></extra>", marker: { color: [], opacity: [], line: { width: 0 } },
  };
  rows.forEach((row, device) => {
    for (const { start, end, operator, busy, count } of row) {
      const backward = operator >= timeline.forward;
      trace.base.push(start);
      trace.x.push(end - start);
      trace.y.push(device + (computing ? -0.14 : 0.28));
      const part = Math.min(busy / (end - start || 1), 1);
      trace.width.push((computing ? 0.52 : 0.28) * Math.max(part, 0.12));
      const colour = kind === "computes" ? timeline.colours[device] : kind === "moves data" ? timeline.moves : timeline.waits;
      trace.marker.color.push(colour);
      trace.marker.opacity.push(kind === "computes" && backward ? 0.55 : 1);
      const what = count > 1 ? `${count} operators from ${timeline.operators[operator]}` : timeline.operators[operator];
      trace.text.push(
        `${timeline.devices[device]} ${kind}<br>${what}, ${backward ? "backward" : "forward"}` +
        `<br>${ms(start)} to ${ms(end)} ms, ${ms(busy)} ms`);
    }
  });
  return trace;
}

// First start and last end of every operator, and the most that a device does for it.
function operatorTable(timeline) {
  const rows = new Map();
  for (const [kind, [devices, operators, starts, lengths]] of Object.entries(timeline.kinds))
    operators.forEach((operator, k) => {
      const start = starts[k], end = starts[k] + lengths[k];
      const row = rows.get(operator) ?? { start, end, computes: {}, moves: {} };
      rows.set(operator, row);
      row.start = Math.min(row.start, start);
      row.end = Math.max(row.end, end);
      const spent = kind === "computes" ? row.computes : kind === "moves data" ? row.moves : {};
      spent[devices[k]] = (spent[devices[k]] ?? 0) + lengths[k];
    });
  const most = (spent) => Math.max(0, ...Object.values(spent));
  const found = [...rows].sort((a, b) => a[0] - b[0]);
  return {
    heads: ["operator", "pass", "from ms", "to ms", "longest computing ms", "longest moving ms"],
    numeric: [false, false, true, true, true, true],
    rows: found.map(([operator, { start, end, computes, moves }]) => [
      plain(timeline.operators[operator]), operator < timeline.forward ? "forward" : "backward",
      ...[start, end, most(computes), most(moves)].map((ns) => (ns / 1e6).toFixed(3)),
    ]),
  };
}

function timelineLayout(timeline, from, to) {
  const count = timeline.devices.length;
  const names = timeline.devices.map((name, rank) => (narrow() || plain(name).length > 28 ? String(rank) : name));
  const every = Math.ceil(count / 32);
  const ticks = names.map((_, rank) => rank).filter((rank) => rank % every === 0);
  return themed({
    barmode: "overlay", height: Math.min(46 * count, Math.max(14 * count, 460)) + 90,
    xaxis: { range: [from, to], title: { text: "milliseconds" }, side: "bottom" },
    yaxis: {
      range: [count - 0.5, -0.5], fixedrange: true, tickvals: ticks, ticktext: ticks.map((rank) => names[rank]),
      showgrid: false, zeroline: false,
    },
  });
}

async function startTimeline() {
  const section = one("#timeline-figure");
  if (!section) return;
  const { timeline } = await data;
  const plot = one(".plot", section);
  const kinds = rowsOf(timeline);
  let from = 0, to = timeline.step_ms;

  async function show(newFrom, newTo) {
    const length = Math.min(Math.max(newTo - newFrom, timeline.step_ms / 1e5), timeline.step_ms);
    from = Math.min(Math.max(newFrom, 0), timeline.step_ms - length);
    to = from + length;
    const traces = barsIn(timeline, kinds, from, to).map((bars) => traceOf(timeline, bars));
    const Plotly = await loadPlotly();
    await Plotly.react(plot, traces, timelineLayout(timeline, from, to), {
      ...CONFIG, displayModeBar: false,
    });
    section.dataset.bars = traces.reduce((n, { x }) => n + x.length, 0);
    one("#timeline-range").textContent = `${ms(from)} to ${ms(to)} of ${ms(timeline.step_ms)} ms`;
  }

  const moves = {
    in: () => show(from + (to - from) / 4, to - (to - from) / 4),
    out: () => show(from - (to - from) / 2, to + (to - from) / 2),
    left: () => show(from - (to - from) / 2, to - (to - from) / 2),
    right: () => show(from + (to - from) / 2, to + (to - from) / 2),
    all: () => show(0, timeline.step_ms),
  };
  for (const button of all("[data-zoom]")) button.addEventListener("click", () => moves[button.dataset.zoom]());
  const details = one("#timeline-numbers");
  details.addEventListener("toggle", () => fillNumbers(details, () => operatorTable(timeline)));

  new IntersectionObserver(async ([{ isIntersecting }], observer) => {
    if (!isIntersecting) return;
    observer.disconnect();
    await show(from, to);
    plot.on("plotly_relayout", (change) => {
      if (change["xaxis.autorange"]) moves.all();
      else if ("xaxis.range[0]" in change) show(change["xaxis.range[0]"], change["xaxis.range[1]"]);
    });
    drawn.set(section, () => show(from, to));
  }, { rootMargin: "300px" }).observe(section);
}

startTimeline();
