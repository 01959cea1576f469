// Keeps a page true while it is looked at, and lets it be used without a mouse. Everything works without this file.
"use strict";

const pulse = document.getElementById("pulse");

function tell(live) {
  if (!pulse) return;
  pulse.className = live ? "live" : "";
  pulse.title = live ? "Live" : "Not live: reconnecting. Reload the page to update it now.";
  pulse.querySelector(".words").textContent = live ? "live" : "offline";
}

// What somebody is typing into, or has opened, is not taken from under his hands.
function busy(part) {
  const at = document.activeElement;
  return (part.contains(at) && at.matches("input, select, textarea")) || part.querySelector("details[open]");
}

function replace(part, html) {
  const at = part.contains(document.activeElement) ? document.activeElement : null;
  const href = at && at.getAttribute("href");
  const scrolled = [...part.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
  part.innerHTML = html;
  part.querySelectorAll(".scroll").forEach((box, i) => { box.scrollLeft = scrolled[i] || 0; });
  if (href) {
    const again = [...part.querySelectorAll("a[href]")].find((link) => link.getAttribute("href") === href);
    if (again) again.focus({ preventScroll: true });
  }
}

function listen() {
  if (!document.querySelector('[id^="live_"]') || !window.EventSource) return;
  const address = new URL(location.href);
  address.searchParams.delete("said");
  address.searchParams.delete("exact");
  address.searchParams.set("live", "1");
  let source = null;
  const open = () => {
    source = new EventSource(address);
    source.onopen = () => tell(true);
    source.onerror = () => tell(false);
    source.onmessage = (message) => {
      tell(true);
      for (const [id, html] of Object.entries(JSON.parse(message.data))) {
        const part = document.getElementById(id);
        if (part && !busy(part)) replace(part, html);
      }
      document.documentElement.dataset.updates = Number(document.documentElement.dataset.updates || 0) + 1;
    };
    source.addEventListener("away", () => tell(false));
    source.addEventListener("gone", () => { source.close(); location.reload(); });
  };
  const close = () => { if (source) source.close(); source = null; tell(false); };
  // A page that nobody sees asks nothing.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) close();
    else if (!source) open();
  });
  addEventListener("pagehide", close);
  open();
}

let went = 0;

function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  if (event.key === "/") {
    const search = document.getElementById("search");
    if (search) { event.preventDefault(); search.focus(); search.select(); }
  } else if (event.key === "j" || event.key === "k") {
    const links = [...document.querySelectorAll("table[data-keys] tbody tr td:first-child a")];
    if (!links.length) return;
    const at = links.indexOf(document.activeElement);
    const next = event.key === "j" ? Math.min(at + 1, links.length - 1) : Math.max(at - 1, 0);
    links[next].focus();
  } else if (event.key === "g") {
    went = Date.now();
  } else if (Date.now() - went < 1500) {
    const link = document.querySelector(`header nav a[data-key="${CSS.escape(event.key)}"]`);
    went = 0;
    if (link) link.click();
  }
}

document.addEventListener("keydown", key);
// A form without answers in its filters need not send their names.
document.querySelectorAll("form.filters").forEach((form) => form.addEventListener("submit", () => {
  form.querySelectorAll("fieldset").forEach((set) => { set.disabled = !set.querySelector("select").value; });
}));
listen();
