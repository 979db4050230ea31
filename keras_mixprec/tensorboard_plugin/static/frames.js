// Milliseconds in which what a reader does comes before what is out of view.
const READER_FIRST = 150;

const queue = new Set();
const later = new Set();
let timer = 0;

// In the next frame, once however often it is asked for.
export function drawSoon(draw) {
  if (!queue.size) {
    requestAnimationFrame(() => {
      const draws = [...queue];
      queue.clear();
      for (const queued of draws) queued();
    });
  }
  queue.add(draw);
}

// One at a time, so that a reader who comes between waits for one at most.
function drawNext() {
  const [next] = later;
  later.delete(next);
  next?.();
  if (later.size) timer = setTimeout(drawNext);
  else delete document.body.dataset.later;
}

function drawLater(draw) {
  later.add(draw);
  document.body.dataset.later = "1";
  clearTimeout(timer);
  timer = setTimeout(drawNext, READER_FIRST);
}

/**
 * Draws a part of the page soon while it is near the view, and otherwise when what the
 * reader sees is drawn: a search in the page, or a screen reader, finds all of it.
 * @param {Element} node
 * @param {() => void} draw
 * @returns {() => void} What asks for it.
 */
export function seenFirst(node, draw) {
  let near = false;
  const watch = new IntersectionObserver((reports) => {
    near = reports.at(-1).isIntersecting;
    if (near && later.delete(draw)) drawSoon(draw);
  }, { rootMargin: "200px" });
  watch.observe(node);
  return () => {
    if (near) drawSoon(draw);
    else drawLater(draw);
  };
}
