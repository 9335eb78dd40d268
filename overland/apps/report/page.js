// Draws the charts of the page: hover shows values, the legend hides lines, dragging zooms all
// charts to the same steps. A live page polls its server for new content.
"use strict";
(() => {
  const NS = "http://www.w3.org/2000/svg";
  const M = { left: 58, right: 10, top: 8, bottom: 26 };
  const WIDTHS = { raw: 1, mean: 1.6, trend: 2.6, curve: 1.4, points: 1.8, lost: 1.3 };
  const COLORS = 7, DOTS = 60, PALE = 0.38;
  const DASHES = ["none", "7 4", "2 3", "9 3 2 3"];
  // Peaks are cut off if this share of a line's points (a validation has few), and at least one, takes up this much of the range.
  const TAIL = 0.001, TAIL_OF_FEW = 0.1, MUCH = 3;

  let data = prepared(JSON.parse(document.getElementById("data").textContent));
  let zoom = null; // [first step, last step]
  const off = new Map(); // "chart|line" → whether the user has hidden it
  const logarithmic = new Set(); // ids of charts
  const whole = new Set(); // ids of charts whose highest peaks are not cut off
  let plots = [];

  function prepared(given) {
    for (const chart of given.charts)
      for (const line of chart.lines) {
        let step = 0;
        line.steps = Float64Array.from(line.steps, (more) => (step += more));
      }
    return given;
  }

  // Elements

  function svg(tag, attributes = {}, ...children) {
    const element = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  function html(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  // Numbers

  function words(value, form, shorten = (text) => text) {
    if (form === "share") return `${trim((value * 100).toPrecision(3))}%`;
    if (form === "count") return value.toLocaleString("en-US", { maximumSignificantDigits: 6 });
    const size = Math.abs(value);
    if (value !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(3).replace(/\.?0*e\+?/, "e");
    return shorten(value.toPrecision(5));
  }

  const trim = (text) => (text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text);
  const steps = (value) => Math.round(value * 100) / 100;
  const grouped = (value) => steps(value).toLocaleString("en-US");

  function ticks(low, high, wanted) {
    const raw = (high - low || Math.abs(high) || 1) / wanted;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((one) => one >= raw * 0.999);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
    return found;
  }

  function powers(low, high) {
    const found = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
      for (const m of high / low > 100 ? [1] : [1, 2, 5]) {
        const value = m * 10 ** p;
        if (value >= low * 0.999 && value <= high * 1.001) found.push(Number(value.toPrecision(6)));
      }
    return found;
  }

  function place(values, wanted) { // index of the last value that is not above
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] <= wanted) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  function nearest(line, step) {
    const at = place(line.steps, step);
    if (at < 0) return 0;
    const later = at + 1 < line.steps.length && line.steps[at + 1] - step < step - line.steps[at];
    return later ? at + 1 : at;
  }

  function sessionOf(line, step) {
    if (line.session !== null) return line.session;
    const known = data.runs[line.run].sessions;
    for (let i = known.length - 1; i >= 0; i--) if (known[i][0] < step) return known[i][1];
    return known.length ? known[0][1] : null;
  }

  // A chart

  class Plot {
    constructor(figure, chart) {
      this.figure = figure;
      this.chart = chart;
      this.box = figure.querySelector(".plot");
      this.height = figure.classList.contains("wide") ? 380 : 230;
      figure.querySelector(".legend")?.remove();
      this.legend = html("div", { class: "legend", role: "group", "aria-label": `Lines of ${chart.title}` });
      this.box.before(this.legend);
      this.svg = svg("svg", { tabindex: "0", role: "img", "aria-label": `${chart.title}. Arrow keys read its values; the table below has them too.` });
      this.tip = html("div", { class: "tip", role: "status", "aria-live": "polite", hidden: "" });
      this.box.replaceChildren(this.svg, this.tip);
      this.names();
      this.listen();
      this.draw();
    }

    key(line) { return `${this.chart.id}|${line.name}`; }
    hidden(line) { return off.get(this.key(line)) ?? !line.shown; }
    get visible() { return this.chart.lines.filter((line) => !this.hidden(line)); }
    color(line) { return line.color < 0 ? "var(--lost)" : `var(--c${line.color % COLORS})`; }
    dash(line) { return line.kind === "lost" ? "2 3" : DASHES[(line.dash + Math.max(0, Math.floor(line.color / COLORS))) % DASHES.length]; }

    names() {
      const done = new Set();
      for (const line of this.chart.lines) {
        if (done.has(line.name)) continue;
        done.add(line.name);
        const sign = svg("svg", { viewBox: "0 0 18 8", "aria-hidden": "true" },
          svg("path", { d: "M0 4H18", stroke: this.color(line), "stroke-width": Math.min(3, WIDTHS[line.kind] + 0.6), "stroke-dasharray": this.dash(line), opacity: line.kind === "raw" ? PALE : 1 }));
        const button = html("button", { type: "button", "aria-pressed": String(!this.hidden(line)) }, sign, line.name);
        button.addEventListener("click", () => {
          off.set(this.key(line), !this.hidden(line));
          button.setAttribute("aria-pressed", String(!this.hidden(line)));
          this.draw();
        });
        this.legend.append(button);
      }
      if (done.size === 1) this.legend.replaceChildren(); // the title is enough
      this.legend.append(html("span", { class: "switches" }, this.switch("all peaks", whole), this.switch("log scale", logarithmic)));
    }

    switch(name, set) {
      const button = html("button", { type: "button", class: "scale", "data-switch": name, "aria-pressed": String(set.has(this.chart.id)) }, name);
      button.addEventListener("click", () => {
        if (!set.delete(this.chart.id)) set.add(this.chart.id);
        button.setAttribute("aria-pressed", String(set.has(this.chart.id)));
        this.draw();
      });
      return button;
    }

    // The range of the values in view; without the rarest peaks, if they would flatten the rest.
    range(log) {
      let low = Infinity, high = -Infinity, usual = -Infinity, cut = false;
      for (const line of this.visible) {
        const [from, to] = this.between(line);
        const values = Array.from(line.values.slice(from, to)).filter((value) => !log || value > 0).sort((a, b) => a - b);
        if (!values.length) continue;
        const tail = Math.max(1, Math.floor(values.length * (line.kind === "points" ? TAIL_OF_FEW : TAIL)));
        low = Math.min(low, values[0]);
        high = Math.max(high, values[values.length - 1]);
        usual = Math.max(usual, values[Math.max(0, values.length - 1 - tail)]);
      }
      if (high < low) return log ? [1, 10, false] : [0, 1, false];
      this.legend.querySelector("[data-switch='all peaks']").hidden = !(high - low > MUCH * (usual - low) && usual > low && !log);
      if (high - low > MUCH * (usual - low) && usual > low && !log && !whole.has(this.chart.id)) [high, cut] = [usual + (usual - low) * 0.25, true];
      if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) * 0.05, high + (Math.abs(high) || 1) * 0.05];
      const margin = log ? 0 : (high - low) * 0.04;
      return [low - margin, high + (cut ? 0 : margin), cut];
    }

    draw() {
      this.width = Math.max(260, this.box.clientWidth || 640);
      const { width, height } = this;
      this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      this.svg.replaceChildren();
      [this.first, this.last] = zoom ?? wholeRange();
      if (this.last <= this.first) this.last = this.first + 1;
      const log = logarithmic.has(this.chart.id);
      const [low, high, cut] = this.range(log);
      this.top = cut ? high : Infinity;
      const scaled = log ? Math.log : (v) => v;
      const bottom = scaled(low), span = scaled(high) - bottom;
      this.x = (step) => M.left + ((step - this.first) / (this.last - this.first)) * (width - M.left - M.right);
      this.y = (value) => Math.max(M.top - 1, height - M.bottom - ((scaled(value) - bottom) / span) * (height - M.top - M.bottom));
      for (const value of log ? powers(low, high) : ticks(low, high, height > 300 ? 6 : 4)) {
        const y = this.y(value).toFixed(1);
        this.svg.append(svg("path", { d: `M${M.left} ${y}H${width - M.right}`, stroke: "var(--line)" }));
        this.svg.append(svg("text", { x: M.left - 8, y: Number(y) + 4, "text-anchor": "end" }, words(value, this.chart.form, trim)));
      }
      for (const step of ticks(this.first, this.last, Math.max(2, Math.min(7, width / 110)))) {
        const anchor = this.x(step) > width - 30 ? "end" : "middle";
        this.svg.append(svg("text", { x: this.x(step).toFixed(1), y: height - 6, "text-anchor": anchor }, grouped(step)));
      }
      if (data.runs.length === 1) this.drawBorders();
      for (const line of this.visible) this.drawLine(line, log);
      this.over = svg("g");
      this.svg.append(this.over);
    }

    // Peaks that are cut off: the highest of every few columns of pixels.
    drawCut(line) {
      const [from, to] = this.between(line), found = new Map();
      for (let i = from; i < to; i++) {
        if (line.values[i] <= this.top) continue;
        const column = Math.floor(this.x(line.steps[i]) / 8);
        if (!found.has(column) || line.values[i] > line.values[found.get(column)]) found.set(column, i);
      }
      for (const i of found.values())
        this.svg.append(svg("path", { class: "cut", d: `M${this.x(line.steps[i]).toFixed(1)} ${M.top - 8}l-4 7h8z`, fill: this.color(line) },
          svg("title", {}, `step ${grouped(line.steps[i])}: ${words(line.values[i], this.chart.form)}`)));
    }

    // Where sessions resumed from an earlier one.
    drawBorders() {
      for (const [step, number] of data.runs[0].sessions) {
        if (step <= this.first || step >= this.last) continue;
        const mark = svg("path", { d: `M${this.x(step).toFixed(1)} ${M.top}V${this.height - M.bottom}`, stroke: "var(--line)", "stroke-width": 2 });
        mark.append(svg("title", {}, `session ${number} resumed from step ${grouped(step)}`));
        this.svg.append(mark);
      }
    }

    drawLine(line, log) {
      const path = this.path(line, log);
      const style = { fill: "none", stroke: this.color(line), "stroke-width": WIDTHS[line.kind], "stroke-linejoin": "round", "stroke-dasharray": this.dash(line), opacity: line.kind === "raw" ? PALE : 1 };
      this.svg.append(svg("path", { d: path, class: "line", "data-line": line.name, ...style }));
      const [from, to] = this.between(line);
      if (to - from <= (line.kind === "lost" ? 1 : DOTS) && (line.kind !== "curve" || to - from === 1))
        for (let i = from; i < to; i++)
          if (!log || line.values[i] > 0)
            this.svg.append(svg("circle", { cx: this.x(line.steps[i]).toFixed(1), cy: this.y(line.values[i]).toFixed(1), r: line.kind === "raw" ? 1.5 : 2.4, fill: this.color(line) }));
      if (this.top < Infinity && line.kind !== "mean" && line.kind !== "trend") this.drawCut(line);
      for (const [step, what] of line.odd)
        if (step >= this.first && step <= this.last)
          this.svg.append(svg("path", { d: `M${this.x(step).toFixed(1)} ${M.top + 8}l-4 -7h8z`, fill: "var(--lost)" }, svg("title", {}, `step ${grouped(step)}: ${what}`)));
    }

    // The points in view, plus one on either side, so that lines reach the edges.
    between(line) {
      return [Math.max(0, place(line.steps, this.first - 1e-9) + 1), place(line.steps, this.last) + 1];
    }

    // First, lowest, highest and last of each column of pixels: no spike is lost.
    path(line, log) {
      const [from, to] = this.between(line);
      let drawn = "", column = -1, kept = [];
      const flush = () => {
        for (const i of [...new Set(kept)].sort((a, b) => a - b))
          drawn += `${drawn ? "L" : "M"}${this.x(line.steps[i]).toFixed(1)} ${this.y(line.values[i]).toFixed(1)}`;
      };
      for (let i = from; i < to; i++) {
        if (log && line.values[i] <= 0) continue;
        const here = Math.floor(this.x(line.steps[i]));
        if (here !== column) {
          flush();
          column = here;
          kept = [i, i, i, i];
        } else {
          if (line.values[i] < line.values[kept[1]]) kept[1] = i;
          if (line.values[i] > line.values[kept[2]]) kept[2] = i;
          kept[3] = i;
        }
      }
      flush();
      return drawn;
    }

    // Hover, keys, zoom

    stepAt(event) {
      const box = this.svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * this.width;
      const share = (x - M.left) / (this.width - M.left - M.right);
      return this.first + Math.min(1, Math.max(0, share)) * (this.last - this.first);
    }

    listen() {
      this.svg.addEventListener("pointermove", (event) => {
        const step = this.stepAt(event);
        if (this.from !== undefined) this.select(this.from, step);
        this.point(step);
      });
      this.svg.addEventListener("pointerleave", () => this.from === undefined && this.leave());
      this.svg.addEventListener("pointerdown", (event) => {
        if (event.button !== 0) return;
        this.from = this.stepAt(event);
        this.svg.setPointerCapture(event.pointerId);
      });
      this.svg.addEventListener("pointerup", (event) => {
        const range = [this.from, this.stepAt(event)].sort((a, b) => a - b);
        this.from = undefined;
        const moved = ((range[1] - range[0]) / (this.last - this.first)) * this.width;
        if (moved > 8 && range[1] - range[0] > 0.5) zoomTo(range);
      });
      this.svg.addEventListener("pointercancel", () => { this.from = undefined; this.draw(); });
      this.svg.addEventListener("dblclick", () => zoomTo(null));
      this.svg.addEventListener("blur", () => this.leave());
      this.svg.addEventListener("keydown", (event) => {
        const line = this.visible[0];
        const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity };
        if (event.key === "Escape") { this.leave(); zoomTo(null); }
        if (!line || !line.steps.length || !(event.key in moves)) return;
        event.preventDefault();
        const now = nearest(line, this.pointed ?? this.first);
        const next = Math.min(line.steps.length - 1, Math.max(0, now + (this.pointed === undefined ? 0 : moves[event.key])));
        this.point(line.steps[next]);
      });
    }

    select(a, b) {
      this.selected?.remove();
      const [from, to] = [this.x(Math.min(a, b)), this.x(Math.max(a, b))];
      this.selected = svg("rect", { x: from, y: M.top, width: to - from, height: this.height - M.top - M.bottom, fill: "var(--accent)", opacity: 0.12 });
      this.svg.append(this.selected);
    }

    leave() {
      this.tip.hidden = true;
      this.pointed = undefined;
      this.over?.replaceChildren();
    }

    // Shows the values at a step: the nearest point of each line.
    point(wanted) {
      const lines = this.visible.filter((line) => line.steps.length && this.between(line)[1] > this.between(line)[0]);
      if (!lines.length) return this.leave();
      const main = lines.find((line) => line.kind !== "lost") ?? lines[0];
      const step = main.steps[nearest(main, wanted)];
      this.pointed = step;
      const x = this.x(step);
      this.over.replaceChildren(svg("path", { d: `M${x} ${M.top}V${this.height - M.bottom}`, stroke: "var(--muted)", "stroke-dasharray": "2 3" }));
      const session = sessionOf(main, step);
      const rows = [html("b", {}, `step ${grouped(step)}${session ? ` · session ${session}` : ""}`)];
      for (const line of lines) {
        const i = nearest(line, step);
        const away = Math.abs(line.steps[i] - step);
        if (away > (this.last - this.first) / 30 && away > 0.5) continue;
        const value = line.values[i];
        this.over.append(svg("circle", { cx: this.x(line.steps[i]), cy: this.y(value), r: 3.5, fill: this.color(line), stroke: "var(--paper)", "stroke-width": 1.5 }));
        const where = line.session !== null ? ` (session ${line.session})` : away > 0.5 && line.kind !== "mean" && line.kind !== "trend" ? ` (step ${grouped(line.steps[i])})` : "";
        rows.push(html("div", { "data-line": line.name, "data-value": value }, html("span", {}, line.name + where), html("span", {}, words(value, this.chart.form))));
      }
      this.tip.replaceChildren(...rows);
      this.tip.hidden = false;
      const scale = this.box.clientWidth / this.width;
      const left = x * scale > this.box.clientWidth / 2 ? x * scale - this.tip.offsetWidth - 14 : x * scale + 14;
      this.tip.style.left = `${Math.max(0, left)}px`;
    }
  }

  function wholeRange() {
    let low = Infinity, high = -Infinity;
    for (const chart of data.charts)
      for (const line of chart.lines)
        if (line.steps.length) {
          low = Math.min(low, line.steps[0]);
          high = Math.max(high, line.steps[line.steps.length - 1]);
        }
    return low > high ? [0, 1] : [low, high];
  }

  function zoomTo(range) {
    zoom = range;
    document.getElementById("unzoom").hidden = range === null;
    for (const plot of plots) { plot.leave(); plot.draw(); }
  }

  function mount() {
    plots = [];
    for (const figure of document.querySelectorAll("figure[data-chart]")) {
      const chart = data.charts.find((one) => one.id === figure.dataset.chart);
      if (chart) plots.push(new Plot(figure, chart));
    }
  }

  // Light and dark

  const theme = document.getElementById("theme");
  const themes = ["automatic", "light", "dark"];
  function setTheme(name) {
    if (name === "automatic") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    theme.textContent = `Theme: ${name}`;
    try { localStorage.setItem("overland-theme", name); } catch { /* a page of a file may not */ }
  }
  theme.hidden = false;
  theme.addEventListener("click", () => setTheme(themes[(themes.indexOf(theme.textContent.slice(7)) + 1) % 3]));
  try { if (themes.includes(localStorage.getItem("overland-theme"))) setTheme(localStorage.getItem("overland-theme")); } catch { /* as above */ }

  document.getElementById("unzoom").addEventListener("click", () => zoomTo(null));
  mount();
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    requestAnimationFrame(() => plots.forEach((plot) => plot.draw()));
  });

  // A live page

  const shown = new Map();
  function update(fresh) {
    const open = new Set([...document.querySelectorAll("details[open]")].map((one) => one.dataset.key));
    const pointed = plots.filter((plot) => plot.pointed !== undefined).map((plot) => [plot.chart.id, plot.pointed]);
    const main = document.getElementById("main");
    for (const section of [...main.children])
      if (section.id !== "foot" && !(section.id in fresh.sections)) section.remove();
    let before = null;
    for (const [id, content] of Object.entries(fresh.sections)) {
      let section = document.getElementById(id);
      if (!section) {
        section = html("section", { id });
        main.insertBefore(section, before ? before.nextSibling : main.firstChild);
        shown.delete(id);
      }
      before = section;
      if (shown.get(id) === content) continue;
      shown.set(id, content);
      section.innerHTML = content; // escaped by the server; the page's policy blocks scripts
    }
    for (const one of document.querySelectorAll("details[data-key]")) one.open = open.has(one.dataset.key);
    data = prepared(fresh.data);
    mount();
    for (const [id, step] of pointed) plots.find((plot) => plot.chart.id === id)?.point(step);
  }

  async function follow(version) {
    let state = "live";
    try {
      const answer = await fetch(`data.json?since=${version}`);
      if (answer.status === 200) {
        const fresh = await answer.json();
        if (!plots.some((plot) => plot.from !== undefined)) {
          update(fresh);
          version = fresh.version;
        }
      }
    } catch { state = "the server does not answer"; }
    document.documentElement.dataset.live = state;
    setTimeout(() => follow(version), state === "live" ? 2000 : 5000);
  }
  if (document.documentElement.dataset.live) follow(0);
})();
