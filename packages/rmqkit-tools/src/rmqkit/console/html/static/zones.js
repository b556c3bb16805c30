// Each time in the browser's own zone beside UTC. Imported by others, so it does nothing by itself: a module that is
// loaded as a script too, with its version in the address, runs twice.
export function zones(part = document) {
  for (const time of part.querySelectorAll("time[datetime]:not([title])")) {
    const at = new Date(time.dateTime);
    if (!Number.isNaN(at.getTime())) time.title = at.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "long" });
  }
}
