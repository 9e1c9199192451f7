"use strict";
const EVERY = 3000;
const at = (id) => document.getElementById(id);
const marks = {}, shownHtml = {};
let newest = "";
let names = {}, one = "", other = "", logMark = "", samples = {}, steps = [], timer = 0, busy = false, again = false;

async function ask(path, key) {
  const since = key && marks[key] ? (path.includes("?") ? "&" : "?") + "since=" + marks[key] : "";
  const answer = await fetch(path + since);
  if (answer.status === 204) return null;
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error || "the server refused");
  if (key) marks[key] = found.mark;
  return found;
}

function put(id, html) {  // markup comes from the server alone, where every text was escaped
  if (shownHtml[id] === html) return;
  const open = [...at(id).querySelectorAll("details")].map((part) => part.open);
  at(id).innerHTML = shownHtml[id] = html;
  at(id).querySelectorAll("details").forEach((part, k) => { part.open = Boolean(open[k]); });
}

function make(tag, texts, ...inside) {
  const element = Object.assign(document.createElement(tag), texts);
  element.append(...inside);
  return element;
}

// ---- which runs

function choose(first, second) {
  const before = one + "/" + other;
  one = names[first] === undefined ? "" : first;
  other = names[second] === undefined || second === one ? "" : second;
  if (before !== one + "/" + other) {
    for (const key of ["view", "samples" + one, "samples" + other]) delete marks[key];
    logMark = "";
    samples = {};
    const words = new URLSearchParams();
    if (one) words.set("run", names[one]);
    if (other) words.set("beside", names[other]);
    history.replaceState(null, "", "#" + words);
  }
  options();
}

function options() {
  const list = Object.entries(names);
  const fill = (select, entries, value) => {
    const now = JSON.stringify(entries);
    if (select.dataset.has !== now) {
      select.dataset.has = now;
      select.replaceChildren(...entries.map(([number, name]) => make("option", {value: number, textContent: name})));
    }
    select.value = value;
  };
  fill(at("one"), list, one);
  fill(at("other"), [["", "no other run"], ...list.filter(([number]) => number !== one)], other);
  at("list").querySelectorAll("tbody tr").forEach((row) => {
    row.className = row.dataset.run === one ? "chosen" : row.dataset.run === other ? "second" : "";
  });
}

function fromAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  const numberOf = (name) => (Object.entries(names).find((entry) => entry[1] === name) || [""])[0];
  return [numberOf(words.get("run")) || newest || "", numberOf(words.get("beside"))];
}

// ---- what is new

async function update() {
  if (busy) { again = true; return; }
  busy = true;
  clearTimeout(timer);
  let wait = EVERY;
  try {
    const list = await ask("list", "list");
    if (list) {
      names = list.names;
      newest = list.newest;
      put("list", list.html);
      heads();
      if (list.waiting) wait = 50;
      if (!one || names[one] === undefined) choose(...fromAddress()); else options();
    }
    if (one) {
      const pair = one + "/" + other;
      const [seen, log] = await Promise.all([
        ask(other ? "pair/" + one + "/" + other : "run/" + one, "view"), ask("log/" + one + "?mark=" + logMark),
        look(one), other ? look(other) : null,
      ]);
      if (pair === one + "/" + other) {
        if (seen) { put("view", seen.view); put("command-list", seen.commands); }
        at("commands").hidden = at("log").hidden = false;
        addLines(log);
        offer();
        parts();
      }
    }
    say("Updated " + new Date().toLocaleTimeString() + ".", false);
  } catch (error) {
    say(error instanceof TypeError ? "The server does not answer: is flowrl watch still running? Trying on."
      : "Not updated: " + error.message + ".", true);
  }
  busy = false;
  if (again) { again = false; wait = 0; }
  timer = setTimeout(() => { if (document.hidden) timer = 0; else update(); }, wait);
}

function parts() {
  const heads = [...document.querySelectorAll("main h2")].filter((head) => head.offsetParent);
  const now = heads.map((head) => head.textContent).join("\n");
  if (at("jump").dataset.has === now) return;
  at("jump").dataset.has = now;
  at("jump").replaceChildren(...heads.map((head) => make("button", {
    type: "button", textContent: head.textContent, onclick: () => at(head.id).scrollIntoView({behavior: "smooth"}),
  })));
}

function say(text, lost) {
  at("said").textContent = text;
  at("said").classList.toggle("lost", lost);
}

function heads() {  // names of columns for phones, where a row is a block
  const titles = [...at("list").querySelectorAll("thead th")].map((cell) => cell.textContent);
  at("list").querySelectorAll("tbody tr").forEach((row) => [...row.cells].forEach((cell, k) => {
    if (k > 1 && k !== 4) cell.dataset.head = titles[k];
  }));
}

function addLines(log) {
  logMark = log.mark;
  const box = at("lines"), low = box.scrollHeight - box.scrollTop - box.clientHeight < 30;
  if (log.again) box.textContent = "";
  if (log.lines.length) box.append(log.lines.join("\n") + "\n");
  if (low || log.again) box.scrollTop = box.scrollHeight;
  at("error").hidden = !log.error;
  if (at("error").textContent !== log.error) at("error").textContent = log.error;
}

// ---- samples

async function look(number) {
  const found = await ask("samples/" + number, "samples" + number);
  if (found) samples[number] = found;
}

function offer() {
  const runs = [one, other].filter((number) => number && samples[number]);
  const found = new Set(runs.flatMap((number) => Object.keys(samples[number].iterations).map(Number)));
  const last = steps.length === 0 || Number(at("when").value) === steps.length - 1;
  const before = steps[Number(at("when").value)];
  steps = [...found].sort((a, b) => a - b);
  at("samples").hidden = steps.length === 0;
  if (!steps.length) return;
  at("when").max = steps.length - 1;
  at("when").disabled = steps.length < 2;
  at("when").value = last || !steps.includes(before) ? steps.length - 1 : steps.indexOf(before);
  const prompts = samples[runs[0]].prompts;
  const entries = [["", "all prompts"], ...prompts.map((entry, k) => [String(k), entry.prompt])];
  if (at("which").dataset.has !== JSON.stringify(entries)) {
    at("which").dataset.has = JSON.stringify(entries);
    at("which").replaceChildren(
      ...entries.map(([value, text]) => make("option", {value, textContent: text.slice(0, 80)})));
  }
  at("samples-lead").textContent = (runs.length > 1 ? "Left " + names[one] + ", right " + names[other] + ". " : "") +
    "Same prompt and same start noise at every iteration; all in order, not picked. Choose one prompt to see all " +
    "iterations of it at once.";
  show();
}

function fileOf(number, iteration, index) {  // the latest sampling up to this iteration
  const kept = samples[number].iterations;
  const when = Object.keys(kept).map(Number).filter((step) => step <= iteration).sort((a, b) => b - a)[0];
  if (when === undefined) return null;
  const stem = String(index).padStart(4, "0");
  const name = [stem + ".mp4", stem + ".png"].find((file) => kept[when].includes(file));
  return name ? {when, address: "sample/" + number + "/" + when + "/" + name, clip: name.endsWith(".mp4")} : null;
}

function placeOf(number, index) {  // of the same prompt in another run
  if (number === one || !samples[one]) return index;
  const asked = samples[one].prompts[index];
  return asked ? samples[number].prompts.findIndex((entry) => entry.prompt === asked.prompt) : -1;
}

function side(number, iteration, index, words) {
  const place = placeOf(number, index), file = place < 0 ? null : fileOf(number, iteration, place);
  const box = make("div", {});
  if (!file) { box.append(make("span", {textContent: "not drawn"})); return box; }
  const media = file.clip
    ? make("video", {src: file.address, muted: true, loop: true, autoplay: true, controls: true, playsInline: true})
    : make("img", {src: file.address, alt: words, onload: small});
  box.append(media, make("span", {textContent: "iteration " + file.when}));
  return box;
}

function small() { this.classList.toggle("pixels", Math.max(this.naturalWidth, this.naturalHeight) <= 128); }

function show() {
  const runs = [one, other].filter((number) => number && samples[number]);
  const iteration = steps[Number(at("when").value)], chosen = at("which").value;
  const said = "iteration " + iteration + " (" + (Number(at("when").value) + 1) + " of " + steps.length + ")";
  at("when-said").textContent = said;
  const state = JSON.stringify([runs, iteration, chosen, steps, runs.map((number) => marks["samples" + number])]);
  if (at("shown").dataset.state === state) return;
  at("shown").dataset.state = state;
  const prompts = samples[runs[0]].prompts;
  const kept = Object.values(samples[runs[0]].iterations).flat();
  const count = Math.max(prompts.length, ...kept.map((name) => parseInt(name, 10) + 1));
  const figures = [];
  for (let k = 0; k < count; k += 1) {
    if (chosen !== "" && Number(chosen) !== k) continue;
    const words = prompts[k] ? prompts[k].prompt : String(k);
    for (const number of chosen === "" ? [null] : runs) {
      const sides = make("div", {className: "sides"});
      if (number === null) sides.append(...runs.map((run) => side(run, iteration, k, words)));
      else for (const step of Object.keys(samples[number].iterations).map(Number).sort((a, b) => a - b)) {
        sides.append(side(number, step, k, words));
      }
      const text = (number !== null && runs.length > 1 ? names[number] + ": " : "") + words;
      figures.push(make("figure", {className: number === null ? "pair" : "pair strip"}, sides,
        make("figcaption", {textContent: text})));
    }
  }
  at("shown").replaceChildren(...figures);
}

// ---- hands

function tip(event) {
  const chart = event.target.closest && event.target.closest("#view svg");
  let best = null, near = Infinity;
  if (chart) {
    const box = chart.getBoundingClientRect(), scale = chart.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    for (const dot of chart.querySelectorAll("circle")) {
      const away = Math.hypot(dot.cx.baseVal.value - x, (dot.cy.baseVal.value - y) / 4);
      if (away < near) { near = away; best = dot; }
    }
  }
  at("tip").hidden = !best || near > 40;
  if (at("tip").hidden) return;
  at("tip").textContent = best.querySelector("title") ? best.querySelector("title").textContent : "";
  const width = at("tip").offsetWidth;
  at("tip").style.left = Math.max(4, Math.min(innerWidth - width - 4, event.clientX - width / 2)) + "px";
  at("tip").style.top = Math.max(4, event.clientY - 42) + "px";
}

async function copy(button) {
  const text = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(text.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(text);
    button.textContent = "Selected";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

document.addEventListener("click", (event) => {
  const row = event.target.closest("[data-run]"), button = event.target.closest(".copy");
  if (row) { choose(row.dataset.run, other); update(); }
  if (button) copy(button);
});
at("one").addEventListener("change", () => { choose(at("one").value, other); update(); });
at("other").addEventListener("change", () => { choose(one, at("other").value); update(); });
at("when").addEventListener("input", show);
at("which").addEventListener("change", show);
document.addEventListener("pointermove", tip);
document.addEventListener("pointerdown", tip);
document.addEventListener("visibilitychange", () => { if (!document.hidden && !timer) update(); });
update();
