// Show each time in the zone of the browser in addition to UTC. This module only exports a function, because it would
// run twice if a page also loaded it as a script, with a version in the address.
export function zones(part = document) {
  for (const time of part.querySelectorAll("time[datetime]:not([title])")) {
    const at = new Date(time.dateTime);
    if (!Number.isNaN(at.getTime())) time.title = at.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "long" });
  }
}
