// Refreshes: a visible page has one stream of events, a hidden tab has no stream. Focus and open details stay.
import { zones } from "./zones.js";

const live = document.getElementById("live");
const pause = document.getElementById("pause");
const status = document.getElementById("status");
const texts = document.body.dataset;
let source = null;
let isPaused = false;

const selectorOf = (one) => {
  if (!one || !live.contains(one)) return null;
  if (one.id) return `#${CSS.escape(one.id)}`;
  if (one.hasAttribute("href")) return `a[href="${CSS.escape(one.getAttribute("href"))}"]`;
  return null;
};
const nameOf = (one) => `${one.closest("section, figure, article")?.querySelector("h2, h3, figcaption")?.textContent ?? ""}|${one.querySelector("summary")?.textContent ?? ""}`;

function put(html) {
  const focused = selectorOf(document.activeElement);
  const selection = document.getSelection();
  if (selection && !selection.isCollapsed && live.contains(selection.anchorNode)) return; // the user is selecting text
  const open = new Set([...live.querySelectorAll("details[open]")].map(nameOf));
  const scrolled = [...live.querySelectorAll(".scroll, pre")].map((one) => [one.scrollLeft, one.scrollTop]);
  live.innerHTML = html; // from our own templates, which escape every value
  for (const one of live.querySelectorAll("details")) if (open.has(nameOf(one))) one.open = true;
  live.querySelectorAll(".scroll, pre").forEach((one, at) => {
    if (scrolled[at]) [one.scrollLeft, one.scrollTop] = scrolled[at];
  });
  if (focused) live.querySelector(focused)?.focus({ preventScroll: true });
  zones(live);
}

function open() {
  if (source || isPaused || document.hidden || !live?.dataset.events) return;
  source = new EventSource(live.dataset.events);
  source.addEventListener("live", (event) => put(event.data));
  source.addEventListener("status", (event) => { if (status && !status.querySelector(".bad")) status.textContent = `${texts.textAsOf} ${new Date(Number(event.data)).toISOString().slice(11, 19)} UTC`; });
  source.addEventListener("trouble", (event) => { if (status) status.textContent = `${texts.textNotFresh}: ${event.data}`; });
  source.addEventListener("end", close);
}
function close() {
  source?.close();
  source = null;
}

if (live?.dataset.events) {
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  open();
}

// The tail of a topic: new rows are added at the top, and the oldest rows beyond the limit are removed.
const tail = document.getElementById("tail");
function follow() {
  if (source || isPaused || document.hidden) return;
  const body = tail.tBodies[0];
  const keep = document.getElementById("keep");
  source = new EventSource(tail.dataset.stream);
  source.addEventListener("rows", (event) => {
    const rows = document.createElement("template");
    rows.innerHTML = event.data;
    body.prepend(...[...rows.content.querySelectorAll("tr")].reverse());
    // After a pause, the next stream continues at this id.
    if (event.lastEventId) {
      const next = new URL(tail.dataset.stream, location);
      next.searchParams.set("after", event.lastEventId);
      tail.dataset.stream = next.pathname + next.search;
    }
    while (body.rows.length > Number(keep.value)) body.rows[body.rows.length - 1].remove();
    zones(body);
  });
  source.addEventListener("status", (event) => (status.textContent = event.data));
  source.addEventListener("dropped", (event) => (document.getElementById("dropped").textContent = `${event.data} ${texts.textDropped}`));
  source.addEventListener("end", (event) => { status.textContent = event.data; close(); });
}
let hiddenFor = 0;
if (tail) {
  document.getElementById("keep-label").hidden = false;
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiddenFor);
    if (document.hidden) hiddenFor = setTimeout(close, 60000);
    else follow();
  });
  follow();
}

if (pause) {
  pause.hidden = false;
  pause.addEventListener("click", () => {
    isPaused = !isPaused;
    pause.setAttribute("aria-pressed", String(isPaused));
    pause.textContent = isPaused ? texts.textGoOn : texts.textPause;
    if (isPaused) close();
    else if (tail) follow();
    else open();
  });
}
