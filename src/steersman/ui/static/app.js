// Behaviour that every page shares: times in the reader's time zone, and the state of the
// connection to the server. Other scripts are imported where a page has what they work on.

const format = new Intl.DateTimeFormat(undefined, { dateStyle: "short", timeStyle: "medium" });

function showTimes(root) {
  for (const time of root.querySelectorAll("time[datetime]")) {
    const text = format.format(new Date(time.dateTime));
    if (time.textContent !== text) {
      time.title ||= time.textContent; // UTC, as the server wrote it
      time.textContent = text;
    }
  }
}

function showConnection(text) {
  const line = document.getElementById("connection");
  if (line.textContent !== text) line.textContent = text;
}

showTimes(document);
document.body.addEventListener("htmx:load", (event) => showTimes(event.target));
document.body.addEventListener("htmx:sseMessage", (event) => showTimes(event.target));
document.body.addEventListener("htmx:sseOpen", () => {
  showConnection("Live");
  document.getElementById("problem").textContent = ""; // of an earlier connection
});
document.body.addEventListener("htmx:sseError", () => showConnection("Connection lost; retrying"));

// Something that was started and failed says so where its answer would be.
function showFailure({ target, requestConfig, xhr }) {
  if (requestConfig?.verb !== "post") return;
  const page = new DOMParser().parseFromString(xhr?.responseText ?? "", "text/html");
  const line = document.createElement("p");
  line.className = "bad";
  line.textContent = page.querySelector("main p")?.textContent || "The server does not answer; is it still running?";
  target.replaceChildren(line);
}

document.body.addEventListener("htmx:responseError", (event) => showFailure(event.detail));
document.body.addEventListener("htmx:sendError", (event) => showFailure(event.detail));

// Scripts that only some pages need; a live part may bring what they work on later.
const scripts = { "[data-chart]": "./charts.js", "[data-graph]": "./graph.js" };

function importScripts() {
  for (const [selector, script] of Object.entries(scripts)) {
    if (document.querySelector(selector)) import(script);
  }
}

importScripts();
document.body.addEventListener("htmx:load", importScripts);
