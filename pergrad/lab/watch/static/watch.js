// The page asks for news of the runs once a second and draws what has changed.
"use strict";

const PAUSE = 1000; // milliseconds between two questions, or more if drawing takes long
const POINTS = 1500; // of a line: more are thinned, and what is lowest and highest stays
const COLUMNS = 240; // of a map of layers
const LISTED = 20; // outlier examples
// The colours of Okabe and Ito, which colour-blind readers can tell apart, and lighter ones for the night.
const COLOURS = {
  light: ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07a00", "#2f8fc4", "#4d4d4d"],
  dark: ["#4c9aff", "#ff8342", "#2cc99a", "#e59ac6", "#f5b335", "#8fd3ff", "#b8bec6"],
};
const DASHES = ["solid", "dash", "dashdot", "dot"];
const LINES = {
  loss: { y: "loss (nats)", of: "rows", number: "loss", dots: "tune_loss" },
  learning_rate: { y: "learning rate", of: "rows", number: "learning_rate" },
  scale: { y: "noise scale (examples)", of: "noise", number: "scale", log: true },
  divisor: { y: "part that is noise", of: "noise", number: "divisor", range: [0, 1.02] },
  gradient_norm: { y: "gradient norm", of: "rows", number: "gradient_norm", log: true },
  outliers: { y: "part of the examples", of: "noise", number: "outliers", from: "tozero" },
};

const night = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 40rem)");
const runs = new Map(); // by path: what the server said last, and all rows until now
const hidden = new Set(); // the paths of the runs that are not drawn
let waiting = []; // the paths in which there is no run yet

// News.

async function ask() {
  const since = {};
  for (const [path, run] of runs) since[path] = run.since;
  const answer = await fetch("news", { method: "POST", body: JSON.stringify(since) });
  if (!answer.ok) throw new Error(answer.statusText);
  return answer.json();
}

/** Takes in what the server said; returns whether there is something new to draw. */
function learn(news) {
  let changed = news.runs.length !== runs.size;
  const known = new Map(runs);
  runs.clear();
  for (const told of news.runs) {
    const old = known.get(told.path);
    const anew = !old || told.anew;
    const run = { ...told, rows: anew ? [] : old.rows, noise: anew ? [] : old.noise };
    run.outliers = anew ? [] : old.outliers;
    for (const row of told.rows || []) add(run, row);
    changed ||= !old || (told.rows || []).length > 0 || run.rows.length !== old.rows.length || told.name !== old.name;
    runs.set(told.path, run);
  }
  waiting = news.waiting;
  return changed;
}

function add(run, row) {
  run.rows.push(row);
  if (row.noise) run.noise.push({ step: row.step, examples: row.examples, ...row.noise });
  for (const found of row.outliers || []) run.outliers.push({ step: row.step, ...found });
  run.outliers = run.outliers.slice(-LISTED);
}

async function follow() {
  for (;;) {
    let more = false;
    const begun = performance.now();
    if (!document.hidden) {
      try {
        const news = await ask();
        more = news.more;
        const changed = learn(news);
        say();
        if (changed && !more) draw();
      } catch (error) {
        tell(`The server does not answer (${error.message}). Is pergrad watch still running? The page asks again.`, true);
      }
    }
    const pause = more ? 0 : Math.max(PAUSE, 3 * (performance.now() - begun));
    await new Promise((resume) => setTimeout(resume, pause));
  }
}

// Words.

function tell(words, bad = false) {
  const status = document.getElementById("status");
  if (status.textContent !== words) status.textContent = words;
  status.classList.toggle("bad", bad);
}

function say() {
  const words = [];
  if (runs.size) words.push(runs.size === 1 ? "One run." : `${runs.size} runs.`);
  for (const path of waiting) words.push(`Waiting for ${path}: there is no run yet.`);
  tell(words.join(" "));
  const list = document.getElementById("runs");
  const paths = [...runs.keys()];
  const shown = [...list.children].map((item) => item.dataset.path);
  if (paths.join("\n") !== shown.join("\n")) list.replaceChildren(...paths.map(card));
  paths.forEach((path, i) => fill(list.children[i], runs.get(path), i));
}

function card(path) {
  const item = make("li");
  item.dataset.path = path;
  item.title = path;
  const label = item.appendChild(make("label"));
  const box = label.appendChild(make("input"));
  box.type = "checkbox";
  box.checked = !hidden.has(path);
  box.addEventListener("change", () => {
    if (box.checked) hidden.delete(path);
    else hidden.add(path);
    draw();
  });
  const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  line.setAttribute("viewBox", "0 0 32 8");
  line.setAttribute("aria-hidden", "true");
  line.appendChild(document.createElementNS(line.namespaceURI, "path")).setAttribute("d", "M0 4H32");
  label.append(line, make("b"), make("span", "said"));
  return item;
}

function fill(item, run, i) {
  const stroke = item.querySelector("path");
  stroke.setAttribute("stroke", colour(i));
  stroke.setAttribute("stroke-width", 3);
  stroke.setAttribute("stroke-dasharray", { solid: "", dash: "8 4", dashdot: "8 3 2 3", dot: "2 3" }[dash(i)]);
  item.querySelector("b").textContent = run.name;
  const said = item.querySelector(".said");
  said.textContent = run.problem || progress(run);
  said.classList.toggle("bad", Boolean(run.problem) || run.state === "diverged");
}

function progress(run) {
  const last = run.rows.at(-1);
  if (!last) return run.state === "done" ? "done" : "no step yet";
  const loss = last.loss === null ? "the loss is not finite" : `loss ${short(last.loss)}`;
  const state = run.state === "going on" ? `last step ${ago(run.seconds)} ago` : run.state;
  return `step ${last.step} of ${run.steps}, ${loss}, ${state}`;
}

function ago(seconds) {
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} days`;
}

function short(number) {
  return number === null || number === undefined ? "–" : Number(number.toPrecision(4)).toString();
}

function make(tag, name = "") {
  const element = document.createElement(tag);
  element.className = name;
  return element;
}

/** Text for Plotly, which takes some tags for markup. */
function plain(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

// Pictures.

function colour(i) {
  const colours = night.matches ? COLOURS.dark : COLOURS.light;
  return colours[i % colours.length];
}

function dash(i) {
  return DASHES[Math.floor(i / COLOURS.light.length) % DASHES.length];
}

function axis() {
  return document.querySelector("input[name=axis]:checked").value;
}

function seen() {
  return [...runs.values()].map((run, i) => ({ run, i })).filter(({ run }) => !hidden.has(run.path));
}

function layout(own) {
  const style = getComputedStyle(document.documentElement);
  const [ink, line, card] = ["--ink", "--line", "--card"].map((name) => style.getPropertyValue(name));
  const grid = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  return {
    margin: { l: 48, r: 12, t: 12, b: 40 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, size: 12, family: getComputedStyle(document.body).fontFamily },
    hoverlabel: { bgcolor: card, bordercolor: line, font: { color: ink } },
    showlegend: false,
    uirevision: axis(),
    ...own,
    xaxis: { title: { text: axis() === "step" ? "step" : "examples seen" }, ...grid, ...own.xaxis },
    yaxis: { ...grid, ...own.yaxis },
  };
}

function plot(place, traces, own, none) {
  let said = place.querySelector(".none");
  if (!said) {
    said = make("p", "none");
    place.append(said);
  }
  said.textContent = none;
  said.hidden = !none;
  const config = { responsive: true, displayModeBar: false };
  return Plotly.react(place, traces, layout(own), config);
}

function draw() {
  for (const [name, line] of Object.entries(LINES)) drawLines(name, line);
  drawLayers();
  drawOutliers();
}

function drawLines(name, line) {
  const traces = [];
  for (const { run, i } of seen()) {
    const look = { name: plain(run.name), hovertemplate: "%{y:.4g}" };
    const [x, y] = thinned(run[line.of].map((row) => row[axis()]), run[line.of].map((row) => row[line.number]));
    const mode = y.length > 60 ? "lines" : "lines+markers";
    const drawn = { color: colour(i), dash: dash(i), width: line.dots ? 1.3 : 1.8 };
    traces.push({ ...look, x, y, mode, line: drawn, marker: { color: colour(i), size: 5 } });
    const dots = line.dots ? run.rows.filter((row) => Number.isFinite(row[line.dots])) : [];
    if (dots.length) {
      const at = { x: dots.map((row) => row[axis()]), y: dots.map((row) => row[line.dots]) };
      const ring = { color: colour(i), size: 8, line: { width: 1.5, color: night.matches ? "#16181b" : "#fff" } };
      traces.push({ ...look, ...at, name: `${look.name}, validation`, mode: "markers", marker: ring });
    }
  }
  const yaxis = { title: { text: line.y }, type: line.log ? "log" : "linear", exponentformat: "power" };
  if (line.log) {
    const values = traces.flatMap((trace) => trace.y).filter((y) => y > 0);
    const [low, high] = values.reduce(([a, b], y) => [Math.min(a, y), Math.max(b, y)], [Infinity, 0]);
    yaxis.tickvals = marksBetween(low, high);
    yaxis.ticktext = yaxis.tickvals.map(String);
  }
  if (line.range) yaxis.range = line.range;
  if (line.from) yaxis.rangemode = line.from;
  const few = seen().length <= 5;
  const empty = !traces.some((trace) => trace.y.some(Number.isFinite));
  plot(document.getElementById(name), traces, { yaxis, hovermode: few ? "x unified" : "closest" }, empty ? missing(line.of) : "");
}

/** Why there is nothing to draw. */
function missing(of) {
  const own = seen().map(({ run }) => run);
  if (!own.length) return runs.size ? "No run is chosen." : "No run is here yet.";
  const silent = of === "noise" && own.every((run) => run.noise_every === 0);
  return silent ? "Nothing is recorded: pergrad train --noise-every 20 records it." : "No step has been recorded yet.";
}

/** At most about POINTS points: of each stretch the lowest and the highest, in their order. */
function thinned(x, y) {
  const width = Math.ceil((2 * y.length) / POINTS);
  if (width <= 2) return [x, y];
  const kept = [];
  for (let first = 0; first < y.length; first += width) {
    let low = first;
    let high = first;
    for (let i = first; i < Math.min(first + width, y.length); i++) {
      if (!Number.isFinite(y[low]) || y[i] < y[low]) low = i;
      if (!Number.isFinite(y[high]) || y[i] > y[high]) high = i;
    }
    kept.push(Math.min(low, high));
    if (low !== high) kept.push(Math.max(low, high));
  }
  return [kept.map((i) => x[i]), kept.map((i) => y[i])];
}

function drawLayers() {
  const place = document.getElementById("layers");
  const drawn = seen().filter(({ run }) => run.noise.length);
  const paths = drawn.map(({ run }) => run.path);
  if (paths.join("\n") !== [...place.children].map((own) => own.dataset.path || "").join("\n"))
    place.replaceChildren(...paths.map(layersCard));
  if (!drawn.length) {
    place.replaceChildren(make("p"));
    place.firstChild.textContent = missing("noise");
    return;
  }
  const every = drawn.flatMap(({ run }) => run.noise.flatMap((row) => Object.values(row.layers))).filter((x) => x > 0);
  let [low, high] = [Infinity, -Infinity];
  for (const x of every) [low, high] = [Math.min(low, x), Math.max(high, x)];
  drawn.forEach(({ run }, i) => {
    place.children[i].querySelector("h3").textContent = run.name;
    drawMap(place.children[i].querySelector(".chart"), run, low, high);
  });
}

function layersCard(path) {
  const figure = make("figure");
  figure.dataset.path = path;
  figure.append(make("h3"), make("div", "chart layers"));
  return figure;
}

/** The numbers that a logarithmic scale names: 1, 2 and 5 in each power of ten. */
function marks() {
  const found = [];
  for (let power = -9; power < 12; power++)
    for (const digit of [1, 2, 5]) found.push(Number(`${digit}e${power}`));
  return found;
}

/** Which of them an axis names that has values from `low` to `high`: at most about eight. */
function marksBetween(low, high) {
  const inside = marks().filter((x) => x >= low / 2.5 && x <= 2.5 * high);
  return inside.length > 8 ? inside.filter((x) => /^1(e|0*$)|^0\.0*1$/.test(String(x))) : inside;
}

function drawMap(place, run, low, high) {
  const names = [...new Set(run.noise.flatMap((row) => Object.keys(row.layers)))].reverse();
  const every = Math.ceil(run.noise.length / COLUMNS);
  const columns = run.noise.filter((_, i) => i % every === 0 || i === run.noise.length - 1);
  const values = names.map((name) => columns.map((row) => row.layers[name]));
  const ticks = marks();
  const trace = {
    type: "heatmap",
    x: columns.map((row) => row[axis()]),
    y: names.map((name) => plain(name)),
    z: values.map((row) => row.map((x) => (x > 0 ? Math.log10(x) : null))),
    text: values.map((row) => row.map((x) => (x > 0 ? x.toPrecision(3) : "no signal seen"))),
    hovertemplate: "%{y}<br>%{x}: %{text}<extra></extra>",
    hoverongaps: true,
    colorscale: "Viridis",
    zmin: Math.log10(low),
    zmax: Math.log10(high),
    colorbar: { thickness: 10, outlinewidth: 0, tickvals: ticks.map(Math.log10), ticktext: ticks.map(String) },
  };
  place.style.height = `${Math.max(14, 5 + 1.05 * names.length)}rem`;
  const half = narrow.matches ? 13 : 16;
  const labels = names.map((name) => plain(name.length > 2 * half + 1 ? `${name.slice(0, half)}…${name.slice(-half)}` : name));
  const yaxis = { tickvals: trace.y, ticktext: labels, tickfont: { size: narrow.matches ? 9 : 11 }, showgrid: false };
  plot(place, [trace], { yaxis, xaxis: { showgrid: false }, hovermode: "closest" }, "");
}

/** A text with a sign for each new line and without its indentation, so that a row of the table stays low. */
function oneLine(text) {
  return text.replace(/[ \t]+/g, " ").replace(/\s*\n\s*/g, " ⏎ ").trim();
}

function drawOutliers() {
  const found = seen().flatMap(({ run }) => run.outliers.map((own) => ({ run: run.name, ...own })));
  found.sort((a, b) => b.step - a.step || b.norm - a.norm);
  const rows = found.slice(0, LISTED).map((own) => {
    const row = make("tr");
    const numbers = (cells) => cells.forEach((said) => (row.appendChild(make("td", "number")).textContent = said));
    row.appendChild(make("td")).textContent = own.run;
    numbers([own.step, short(own.times_median)]);
    row.appendChild(make("td")).appendChild(make("code")).textContent = oneLine(own.text || "");
    numbers([short(own.norm), own.place]);
    return row;
  });
  if (!rows.length) {
    const cell = make("td");
    cell.colSpan = 6;
    cell.textContent = seen().some(({ run }) => run.noise.length) ? "None so far." : missing("noise");
    rows.push(make("tr"));
    rows[0].append(cell);
  }
  document.querySelector("#examples tbody").replaceChildren(...rows);
}

for (const query of [night, narrow])
  query.addEventListener("change", () => {
    say();
    draw();
  });
for (const choice of document.querySelectorAll("input[name=axis]")) choice.addEventListener("change", draw);
draw();
follow();
