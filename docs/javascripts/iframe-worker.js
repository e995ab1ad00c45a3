// A page opened from the disk may start no Worker, and the search runs in one. There, and only there,
// an invisible frame does the worker's work. The name of the class is what the search looks for, that
// of the file what keeps the theme from loading such a script from another host.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<body></body>";
      this.inside = new Promise((resolve) => {
        frame.onload = () => resolve(frame.contentWindow);
      }).then(async (inside) => {
        const load = (address) =>
          new Promise((loaded, failed) => {
            const script = inside.document.createElement("script");
            script.onload = loaded;
            script.onerror = failed;
            script.src = address;
            inside.document.body.append(script);
          });
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        // One after the other: each may build on the one before.
        inside.importScripts = async (...addresses) => {
          for (const address of addresses) await load(address);
        };
        await load(new URL(url, location.href).href);
        return inside;
      });
      document.body.append(frame);
    }

    async postMessage(data) {
      const inside = await this.inside;
      inside.dispatchEvent(new inside.MessageEvent("message", { data }));
    }
  };
  window.Worker = window.IFrameWorker;
}
