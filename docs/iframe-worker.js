// Search in a page opened as a file. Browsers allow no Worker there, so an empty iframe runs the same script.
// mkdocs-material's offline plugin would otherwise load such a script from the network; it looks for this file's name.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.loaded = new Promise((done, failed) => {
        const script = inside.document.createElement("script")
        script.onload = done
        script.onerror = failed
        script.src = url
        inside.document.body.append(script)
      })
      this.send = data => inside.dispatchEvent(new inside.MessageEvent("message", { data }))
      this.terminate = () => frame.remove()
    }
    postMessage(data) {
      this.loaded.then(() => this.send(data))
    }
  }
}
