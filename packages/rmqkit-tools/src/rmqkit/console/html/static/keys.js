// Shortcuts with single keys. They can be switched off (WCAG 2.1.4), and are ignored while the user types.
const base = document.body.dataset.keys;
const places = { o: "", t: "topics", r: "groups", b: "brokers", c: "clients", d: "dead", h: "ha" };
const help = document.getElementById("help");
const off = document.getElementById("keys-off");
let isGoing = false;
let row = -1;

const kept = () => { try { return localStorage.getItem("rmq-keys-off") === "1"; } catch { return false; } };
off.checked = kept();
off.addEventListener("change", () => { try { localStorage.setItem("rmq-keys-off", off.checked ? "1" : "0"); } catch { /* the choice is only for this page */ } });

function step(by) {
  const rows = [...document.querySelectorAll("table[data-rows] tbody tr")];
  if (!rows.length) return;
  row = Math.min(Math.max(row + by, 0), rows.length - 1);
  rows[row].querySelector("a")?.focus();
}

const box = document.getElementById("search");
const shown = document.querySelector(".places [aria-current]");
if (shown) shown.closest("ul").scrollLeft = shown.offsetLeft - innerWidth / 3;

document.addEventListener("keydown", (event) => {
  if (box && event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey) && !event.altKey && !event.shiftKey) {
    event.preventDefault();
    box.focus();
    box.select();
    return;
  }
  if (off.checked || event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.target.closest("input, select, textarea, [contenteditable]")) return;
  if (isGoing) {
    isGoing = false;
    if (event.key === "a") location.href = document.querySelector('.places a[href$="/audit"]').href;
    else if (base && event.key in places) location.href = base + places[event.key];
    return;
  }
  switch (event.key) {
    case "/": (document.querySelector("main input[type=search], main form.grid input") ?? box)?.focus(); event.preventDefault(); break;
    case "g": isGoing = true; setTimeout(() => { isGoing = false; }, 1500); break;
    case "j": step(1); break;
    case "k": step(-1); break;
    case "e": document.querySelector("a[data-explain]")?.click(); break;
    case "p": document.getElementById("pause")?.click(); break;
    case "?": help.showModal(); break;
  }
});
