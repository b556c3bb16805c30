// A filter requests the page 250 ms after the last key. The address is always the address of the shown page.
for (const field of document.querySelectorAll("input[data-filter]")) {
  let waiting = 0;
  let asked = field.value;
  const go = async () => {
    if (field.value === asked) return;
    asked = field.value;
    const target = new URL(field.form.action, location.href);
    for (const [name, value] of new FormData(field.form)) if (value) target.searchParams.set(name, value);
    const answer = await fetch(target, { headers: { accept: "text/html" } });
    if (!answer.ok || field.value !== asked) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const live = document.getElementById("live");
    const fresh = page.getElementById("live");
    live.replaceChildren(...fresh.childNodes);
    if (fresh.dataset.events) live.dataset.events = fresh.dataset.events;
    history.replaceState(null, "", target);
  };
  field.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(go, 250);
  });
}
// The address contains no empty fields.
for (const form of document.querySelectorAll("form.grid")) {
  form.addEventListener("submit", () => {
    for (const field of form.elements) if (field.name && !field.value) field.disabled = true;
    setTimeout(() => { for (const field of form.elements) field.disabled = false; });
  });
}
