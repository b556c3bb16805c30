// Switch between light and dark without a request to the server.
import { zones } from "./zones.js";

const root = document.documentElement;
const texts = document.body.dataset;

const form = document.querySelector("form.theme");
form?.addEventListener("submit", (event) => {
  if (event.submitter?.name === "lang") return;
  event.preventDefault();
  const button = form.querySelector("button");
  const isSystemDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = root.dataset.theme ?? (isSystemDark ? "dark" : "light");
  const chosen = now === "dark" ? "light" : "dark";
  root.dataset.theme = chosen;
  document.cookie = `rmq_theme=${chosen}; max-age=31536000; samesite=strict; path=/`;
  button.textContent = chosen === "dark" ? texts.textLight : texts.textDark;
});
if (form && !root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches) {
  form.querySelector("button").textContent = texts.textLight;
}
zones();
