/* The search runs in a worker. Browsers refuse workers to pages that were opened from a folder (file://), so there it
   runs in a hidden frame, which has the same messages. Material finds this class under the name IFrameWorker. */
"use strict";

class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    const page = frame.contentDocument;
    page.open();
    const inside = (this.inside = frame.contentWindow);
    inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    inside.importScripts = (...urls) =>
      urls.reduce((before, one) => before.then(() => load(page, one)), Promise.resolve());
    this.ready = new Promise((resolve) => {
      inside.whenLoaded = resolve;
    });
    page.write(`<!doctype html><body><script src="${url}" onload="whenLoaded()"></script>`);
    page.close();
  }

  postMessage(data) {
    this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
  }
}

function load(page, url) {
  return new Promise((resolve, reject) => {
    const script = page.createElement("script");
    script.src = url;
    script.onload = resolve;
    script.onerror = reject;
    page.body.append(script);
  });
}

if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = IFrameWorker;
}
