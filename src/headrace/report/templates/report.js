"use strict";
(() => {
  const MAX_RECTANGLES = 3000;
  const MAX_FIRST_STEPS = 160;
  const data = JSON.parse(document.getElementById("data").textContent);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const byId = (id) => document.getElementById(id);
  const narrow = () => window.innerWidth < 600;

  // 3 significant digits, in the unit that fits, as core/units.py writes them.
  function time(us) {
    const [value, unit] = us < 1e3 ? [us, "us"] : us < 1e6 ? [us / 1e3, "ms"] : [us / 1e6, "s"];
    return (value >= 100 ? value.toFixed(0) : Number(value.toPrecision(3))) + " " + unit;
  }

  function layout(extra) {
    const axis = { gridcolor: css("line"), linecolor: css("line"), zeroline: false, fixedrange: false };
    const base = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: css("ink"), family: getComputedStyle(document.body).fontFamily, size: 12 },
      hoverlabel: { bgcolor: css("card"), bordercolor: css("line"), font: { color: css("ink") } },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
      margin: { l: 64, r: 10, t: 34, b: 42 }, hovermode: "closest", dragmode: narrow() ? false : "zoom",
    };
    const all = { ...base, ...extra };
    all.xaxis = { ...axis, ...(extra.xaxis || {}) };
    all.yaxis = { ...axis, ...(extra.yaxis || {}) };
    return all;
  }
  const config = { responsive: true, displaylogo: false, displayModeBar: false };

  // Where `count` neighbours are worth most, with the weight of their worth in the middle: the first look falls there.
  function worst(values, count) {
    const n = values.length, start = (i) => Math.max(0, Math.min(i, n - count));
    let sum = 0, best = -1, at = 0;
    values.forEach((value, i) => {
      sum += value - (i >= count ? values[i - count] : 0);
      if (i >= count - 1 && sum > best) { best = sum; at = i - count + 1; }
    });
    if (best <= 0) return 0;
    let middle = 0;
    for (let i = at; i < Math.min(at + count, n); i++) middle += (i * values[i]) / best;
    return start(Math.round(middle - count / 2));
  }

  // --- Steps over time -------------------------------------------------------------------------------------


  function outline(s, values) {
    // A bar per step as one path (5,000 steps stay light). Steps that were left out stay a gap, not a slope.
    const x = [], y = [];
    for (let i = 0; i < s.idx.length; i++) {
      if (i > 0 && s.idx[i] !== s.idx[i - 1] + 1) { x.push(s.idx[i - 1] + 1, null); y.push(0, null); }
      const v = values[i] / 1e3;
      x.push(s.idx[i], s.idx[i], s.idx[i] + 1, s.idx[i] + 1);
      y.push(0, v, v, 0);
    }
    return { x, y };
  }

  function drawSteps() {
    const s = data.series, n = s.idx.length, count = Math.min(MAX_FIRST_STEPS, n), at = worst(s.stall, count);
    const path = (values, name, color) => ({
      type: "scatter", mode: "lines", name, ...outline(s, values), fill: "tozeroy", connectgaps: false,
      line: { width: 1, color: css(color) }, fillcolor: css(color), hoverinfo: "skip",
    });
    // An invisible line through the steps carries the words, so that hovering says the step and both times.
    const hover = {
      type: "scatter", mode: "lines", showlegend: false, x: s.idx.map((i) => i + 0.5), y: s.step.map((v) => v / 1e3),
      line: { width: 0, color: "rgba(0,0,0,0)" },
      text: s.idx.map((i, k) => `step ${i}: ${time(s.step[k])}, stall ${time(s.stall[k])}` + (s.epoch[k] ? ", starts an epoch" : "")),
      hovertemplate: "%{text}<extra></extra>",
    };
    const epochs = s.idx.filter((_, k) => s.epoch[k]);
    const mark = {
      type: "scatter", mode: "lines", name: "epoch start", hoverinfo: "skip", line: { color: css("soft"), width: 1, dash: "dot" },
      x: epochs.flatMap((i) => [i, i, null]), y: epochs.flatMap(() => [0, 1, null]), yaxis: "y2",
    };
    const range = [s.idx[at], s.idx[Math.min(at + count, n) - 1] + 1];
    // An epoch's start may wait a hundred times longer than a step: it may leave the picture, the sawtooth may not.
    const sorted = [...s.step].sort((a, b) => a - b);
    const top = Math.min(sorted[n - 1], 1.6 * sorted[Math.min(n - 1, Math.floor(n * 0.985))]) * 1.05 / 1e3;
    Plotly.react(byId("steps"), [path(s.step, "step time", "step"), path(s.stall, "of it stall", "stall"), mark, hover], layout({
      height: narrow() ? 340 : 400, hovermode: "x",
      xaxis: { title: { text: "step" }, range, rangeslider: { visible: n > count, range: [s.idx[0], s.idx[n - 1] + 1], thickness: 0.14, bgcolor: css("code"), bordercolor: css("line") } },
      yaxis: { title: { text: "ms" }, range: [0, top], rangemode: "tozero" },
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    }), config);
    const cut = sorted[n - 1] / 1e3 > top ? ` Bars above ${time(top * 1e3)} are cut; the longest is ${time(sorted[n - 1])}.` : "";
    const kept = s.seen > n ? `${n.toLocaleString("en")} of ${s.seen.toLocaleString("en")} steps were kept, the worst among them. ` : "";
    byId("steps-note").textContent = kept + (n > count
      ? `Shown first: the ${count} steps that stall most; the strip below shows all, drag its ends. Dotted: an epoch starts.`
      : "Dotted: an epoch starts.") + cut;
  }

  // --- Lanes -----------------------------------------------------------------------------------------------

  // Inside a step: drawn thinner, over it.
  const INNER = new Set(["backward", "optimizer", "sync", "save", "dist"]);
  const KIND_WORDS = { wait: "data wait", epoch: "wait at an epoch start" };
  let lanes = null;

  function readLanes() {
    const l = data.lanes, start = [];
    let now = 0;
    for (const gap of l.gap) { now += gap; start.push(now); }
    const isWait = l.kinds.map((k) => k === "wait" || k === "epoch");
    const marks = [], waits = [];
    for (let i = 0; i < start.length; i++) if (isWait[l.kind[i]]) { marks.push(start[i]); waits.push(l.dur[i]); }
    const end = start.reduce((m, t, i) => Math.max(m, t + l.dur[i]), 0);
    if (marks.length < 2) {
      const pieces = 200;
      marks.length = waits.length = 0;
      for (let i = 0; i < pieces; i++) { marks.push(start[0] + ((end - start[0]) * i) / pieces); waits.push(0); }
    }
    return { ...l, start, marks, waits, end };
  }

  function pick(from, to) {
    const found = [];
    for (let i = 0; i < lanes.start.length && lanes.start[i] < to; i++) if (lanes.start[i] + lanes.dur[i] > from) found.push(i);
    if (found.length <= MAX_RECTANGLES) return [found, 0];
    const kept = found.slice().sort((a, b) => lanes.dur[b] - lanes.dur[a]).slice(0, MAX_RECTANGLES);
    return [kept, found.length - kept.length];
  }

  function drawLanes() {
    const count = Number(byId("lanes-count").value), slider = byId("lanes-at");
    slider.max = String(Math.max(0, lanes.marks.length - count));
    const at = Math.min(Number(slider.value), Number(slider.max));
    const from = lanes.marks[at], to = at + count < lanes.marks.length ? lanes.marks[at + count] : lanes.end;
    const [shown, dropped] = pick(from, to);
    // Lanes without an event here are left out: loaders that start new workers in every epoch have many.
    const busy = [...new Set(shown.map((i) => lanes.lane[i]))].sort((a, b) => a - b);
    const row = new Map(busy.map((lane, i) => [lane, i]));
    const traces = lanes.kinds.map((kind, k) => {
      const mine = shown.filter((i) => lanes.kind[i] === k);
      return {
        type: "bar", orientation: "h", name: KIND_WORDS[kind] || kind, width: INNER.has(kind) ? 0.38 : 0.78,
        y: mine.map((i) => row.get(lanes.lane[i])), base: mine.map((i) => lanes.start[i] / 1e6), x: mine.map((i) => lanes.dur[i] / 1e6),
        marker: { color: css(kind), line: { width: 0 } },
        text: mine.map((i) => `${KIND_WORDS[kind] || kind} ${time(lanes.dur[i])}` + (lanes.batch[i] >= 0 ? `, batch ${lanes.batch[i]}` : "")),
        textposition: "none", hovertemplate: "%{text}<extra></extra>",
      };
    }).filter((trace) => trace.x.length);
    traces.sort((a, b) => b.width - a.width);
    const rows = busy.length;
    const names = busy.map((lane) => lanes.names[lane]).map((n) => (n.length > 26 ? n.slice(0, 13) + "\u2026" + n.slice(-12) : n));
    const height = 74 + rows * (rows > 24 ? 15 : 26);
    byId("lanes").style.minHeight = height + "px";
    Plotly.react(byId("lanes"), traces, layout({
      barmode: "overlay", height, showlegend: false, margin: { l: 40, r: 10, t: 6, b: 42 },
      xaxis: { title: { text: "seconds since the run began" }, range: [from / 1e6, to / 1e6] },
      yaxis: { tickvals: names.map((_, i) => i), ticktext: names.map(escape), range: [rows - 0.5, -0.5], showgrid: false, automargin: true, tickfont: { size: narrow() ? 10 : 12 } },
    }), config);
    byId("lanes-note").textContent = `${time(to - from)} of ${time(lanes.end - lanes.start[0])} recorded` +
      (dropped ? `; the ${dropped} shortest of ${shown.length + dropped} events are not drawn` : "") + ".";
  }

  // plotly reads a little HTML in labels.
  function escape(name) { return name.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;"); }

  function startLanes() {
    lanes = readLanes();
    const slider = byId("lanes-at"), count = byId("lanes-count");
    const go = (at) => { slider.value = String(at); drawLanes(); };
    const first = () => { slider.max = String(lanes.marks.length); go(worst(lanes.waits, Number(count.value))); };
    const move = (sign) => go(Number(slider.value) + sign * Math.ceil(Number(count.value) / 2));
    slider.addEventListener("input", drawLanes);
    count.addEventListener("change", drawLanes);
    byId("lanes-worst").addEventListener("click", first);
    byId("lanes-back").addEventListener("click", () => move(-1));
    byId("lanes-on").addEventListener("click", () => move(1));
    first();
  }

  if (data.series) drawSteps();
  if (data.lanes) startLanes();
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    if (data.series) drawSteps();
    if (data.lanes) drawLanes();
  });
})();
