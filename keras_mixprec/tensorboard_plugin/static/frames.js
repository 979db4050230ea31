// Milliseconds in which the reader's actions come before parts out of view.
const READER_FIRST = 150;

const queue = new Set();
// The functions that this frame has called.
let drawn = null;
const later = new Set();
let timer = 0;

/**
 * In the next frame, once however often it is asked for. What is asked for while that frame is
 * drawn is drawn in it as well: a card that fills itself and then its picture takes one.
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
      // Not one for ever that asks for itself.
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

// One at a time, so that a reader who comes between waits for one at most.
function drawNext() {
  const [next] = later;
  later.delete(next);
  next?.();
  if (later.size) timer = setTimeout(drawNext);
  else delete document.body.dataset.later;
}

/**
 * After what the reader sees is drawn, once however often it is asked for.
 * @param {() => void} draw
 */
export function drawLater(draw) {
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
