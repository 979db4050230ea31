// The number of milliseconds without a user action after which parts out of view are drawn.
const READER_FIRST = 150;

const queue = new Set();
// The functions that were called in the current frame.
let drawn = null;
const later = new Set();
let timer = 0;

/**
 * Calls `draw` in the next frame, only once even after several requests. Requests that
 * come while a frame is drawn join that frame, so a card and its chart need only one frame.
 * @param {() => void} draw
 */
export function drawSoon(draw) {
  if (!queue.size && !drawn) requestAnimationFrame(drawFrame);
  queue.add(draw);
}

function drawFrame() {
  drawn = new Set();
  try {
    for (const draw of queue) {
      // A function that requests itself has to wait for the next frame.
      if (drawn.has(draw)) continue;
      queue.delete(draw);
      drawn.add(draw);
      draw();
    }
  } finally {
    drawn = null;
    if (queue.size) requestAnimationFrame(drawFrame);
  }
}

// Calls one waiting function at a time, so that a user action waits for one function at most.
function drawNext() {
  const [next] = later;
  later.delete(next);
  next?.();
  if (later.size) timer = setTimeout(drawNext);
  else delete document.body.dataset.later;
}

/**
 * Calls `draw` after the visible parts are drawn, only once even after several requests.
 * @param {() => void} draw
 */
export function drawLater(draw) {
  later.add(draw);
  document.body.dataset.later = "1";
  clearTimeout(timer);
  timer = setTimeout(drawNext, READER_FIRST);
}

/**
 * Draws a part of the page soon if it is near the view, and otherwise after the visible parts.
 * All parts are drawn in the end, for screen readers and for searches in the page.
 * @param {Element} node
 * @param {() => void} draw
 * @returns {() => void} A function that requests `draw`.
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
