"use strict";
const at = (id) => document.getElementById(id);
const KEYS = {
  pairwise: {first: ["1", "arrowleft"], second: ["2", "arrowright"], tie: ["3", "t", "arrowdown"], skip: ["s"]},
  binary: {bad: ["1", "b", "arrowleft"], good: ["2", "g", "arrowright"], skip: ["s"]},
};
const LABELS = {
  pairwise: [["first", "Left", "\u2190"], ["tie", "Equal", "\u2193"], ["second", "Right", "\u2192"], ["skip", "Skip", "S"]],
  binary: [["bad", "Bad", "\u2190"], ["good", "Good", "\u2192"], ["skip", "Skip", "S"]],
};
const voter = (() => {  // so that a page that is loaded again is the same voter
  let word = null;
  try { word = localStorage.getItem("voter"); } catch { /* private windows may have none */ }
  word = word || [...crypto.getRandomValues(new Uint8Array(12))].map((x) => x.toString(16).padStart(2, "0")).join("");
  try { localStorage.setItem("voter", word); } catch { /* then it is one of this page */ }
  return word;
})();
let now = null, shown = null, ready = false, sending = false, ends = null, timer = 0;

function make(tag, texts, ...inside) {
  const element = Object.assign(document.createElement(tag), texts);
  element.append(...inside);
  return element;
}

function say(text, bad) {
  at("said").textContent = text;
  at("said").classList.toggle("bad", Boolean(bad));
}

// An image, or a clip where its type says so.
async function media(number, alt) {
  const answer = await fetch("file/" + number);
  if (!answer.ok) throw new Error((await answer.json()).detail);
  if (answer.headers.get("content-type").startsWith("video")) {
    return make("video", {src: "file/" + number, autoplay: true, loop: true, muted: true, controls: true});
  }
  const image = make("img", {src: "file/" + number, alt});
  await image.decode();
  image.classList.toggle("small", image.naturalWidth <= 256);
  return image;
}

async function row(id, numbers, chosen) {
  at(id).hidden = numbers.length < (chosen === undefined ? 1 : 2);
  if (at(id).hidden) return;
  const found = await Promise.all(numbers.map((number, k) => media(number, "candidate " + (k + 1))));
  found.forEach((one, k) => { one.classList.toggle("now", numbers[k] === chosen); one.controls = false; });
  at(id).querySelector(".row").replaceChildren(...found);
}

async function show(question, ask) {
  shown = question.number;
  ready = false;
  buttons(ask);
  at("words").textContent = now.words;
  at("prompt").textContent = "\u201c" + question.prompt + "\u201d";
  const sides = ask === "pairwise" ? [["first", "Left"], ["second", "Right"]] : [["", ""]];
  try {
    const found = await Promise.all(question.shown.map((number, k) => media(number, sides[k][1] || "candidate")));
    if (shown !== question.number) return;
    at("images").replaceChildren(...found.map((one, k) => {
      const [answer, name] = sides[k], clip = one.tagName === "VIDEO";
      const frame = answer && !clip ? make("button", {type: "button", title: "This one is better"}, one) : one;
      if (answer && !clip) frame.addEventListener("click", () => vote(answer));
      return make("figure", {}, frame, make("figcaption", {textContent: name}));
    }));
    await row("sources", question.sources);
    await row("candidates", ask === "binary" ? question.candidates : [], question.shown[0]);
    ready = true;
    buttons(ask);
    for (const number of now.next || []) media(number, "").catch(() => {});
  } catch (error) {
    say("An image cannot be shown: " + error.message, true);
    shown = null;
  }
}

function buttons(ask) {
  at("answers").classList.toggle("three", ask === "pairwise");
  at("answers").replaceChildren(...LABELS[ask].map(([answer, name, key]) => {
    const button = make("button", {type: "button", disabled: !ready || sending, className: answer === "skip" ? "skip" : ""},
      name, make("kbd", {textContent: key}));
    button.addEventListener("click", () => vote(answer));
    return button;
  }));
}

function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  return whole < 60 ? whole + " s" : Math.floor(whole / 60) + " min " + String(whole % 60).padStart(2, "0") + " s";
}

function facts() {
  if (now === null) return;
  const part = (value, text) => make("span", {}, make("b", {textContent: value}), text);
  const parts = [part(Math.max(0, now.iteration) + " of " + now.iterations, " iterations done")];
  if (now.all && now.stage !== "train") parts.push(part(now.done + " of " + now.all, " questions answered, " + (now.all - now.done) + " left"));
  if (ends !== null && now.stage !== "train") parts.push(part(duration((ends - Date.now()) / 1000), " left to vote"));
  at("facts").replaceChildren(...parts);
  at("bar").firstChild.style.width = now.all ? (100 * now.done) / now.all + "%" : "0";
}

function rest() {
  const words = {
    train: now.iteration < 0 ? ["The first images are being drawn."] : [
      "Training continues" + (now.missing ? " without " + now.missing + " of " + now.all + " questions." : ", with all answers."),
      "Thank you. The next images appear here by themselves; leave the page open.",
    ],
    wait: ["You have answered everything that is there.", "Other voters are still at it."],
  }[now.stage] || [""];
  if (now.stage === "train" && now.iteration < 0) words.push("They appear here by themselves; leave the page open.");
  at("rest").replaceChildren(words[0], make("small", {textContent: words[1] || ""}));
}

function take(state) {
  now = state;
  ends = state.seconds === undefined ? null : Date.now() + 1000 * state.seconds;
  const asks = state.stage === "vote";
  at("ask").hidden = !asks;
  at("ask").className = state.ask;
  at("rest").hidden = asks;
  document.title = asks ? "(" + (state.all - state.done) + ") Vote" : "Vote";
  facts();
  if (!asks) {
    shown = null;
    rest();
  } else if (state.question.number !== shown) {
    show(state.question, state.ask);
  }
}

async function ask(path, options) {
  const answer = await fetch(path, options);
  const found = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(found.detail || found.detail || found.error), {refused: true});
  return found;
}

async function look() {
  clearTimeout(timer);
  try {
    take(await ask("state?voter=" + voter));
    if (at("said").dataset.lost) { delete at("said").dataset.lost; say(""); }
  } catch (error) {
    at("said").dataset.lost = "1";
    say(error.refused ? error.message : "The run does not answer: it has ended or was stopped, or the connection broke. "
      + "Answers that you gave are kept.", true);
  }
  timer = setTimeout(look, now && now.stage === "vote" ? 4000 : 1500);
}

async function vote(answer) {
  if (!ready || sending || shown === null) return;
  sending = true;
  buttons(now.ask);
  const body = JSON.stringify({question: shown, voter, answer});
  try {
    const state = await ask("vote", {method: "POST", headers: {"content-type": "application/json"}, body});
    say("");
    sending = false;
    take(state);
  } catch (error) {
    sending = false;
    buttons(now.ask);
    say(error.refused ? error.message : "The run does not answer, so this answer is not counted.", true);
    if (error.refused) { shown = null; look(); }
  }
}

document.addEventListener("keydown", (event) => {
  if (event.repeat || event.ctrlKey || event.metaKey || event.altKey || now === null || now.stage !== "vote") return;
  const key = event.key.toLowerCase();
  const found = Object.entries(KEYS[now.ask]).find(([, keys]) => keys.includes(key));
  if (!found) return;
  event.preventDefault();
  vote(found[0]);
});
setInterval(facts, 1000);
look();
