export function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}

export function linearScale(domain, range) {
  const [from, until] = domain;
  const span = until - from || 1;
  const ratio = (range[1] - range[0]) / span;
  const scale = (value) => range[0] + (value - from) * ratio;
  scale.invert = (position) => from + (position - range[0]) / (ratio || 1);
  return scale;
}

export function niceTicks(from, until, count, least = 1) {
  const span = until - from;
  if (!(span > 0) || count < 1) return [from];
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  // Ticks on a step axis are at least 1 apart, because fractional steps do not exist.
  const size = Math.max(least, unit);
  const first = Math.ceil(from / size);
  const ticks = [];
  for (let place = first; place * size <= until; place += 1) ticks.push(place * size);
  return ticks;
}

export function exponentTicks(low, high, count) {
  const size = [1, 2, 4, 8, 16, 32, 64, 128].find((unit) => {
    return (high - low) / unit <= count;
  }) ?? 256;
  const ticks = [];
  for (let tick = Math.ceil(low / size) * size; tick <= high; tick += size) {
    ticks.push(tick);
  }
  return ticks;
}

// Returns the number of elements up to `value` in a rising list.
export function countAtMost(rising, value) {
  let low = 0;
  let high = rising.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rising[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

export function valueAtStep(steps, values, step) {
  if (!steps.length) return null;
  return values[Math.max(0, countAtMost(steps, step) - 1)];
}

export function stepDomain(lastStep, zoom) {
  if (zoom) return zoom;
  const padding = 0.5 + lastStep * 0.004;
  return [-padding, lastStep + padding];
}

export function zoomedDomain(domain, center, factor, limits) {
  const half = ((domain[1] - domain[0]) * factor) / 2;
  const from = Math.max(limits[0], center - half);
  const until = Math.min(limits[1], center + half);
  if (from <= limits[0] && until >= limits[1]) return null;
  return until - from < 2 ? domain : [from, until];
}

export function nearestMark(marks, position, reach) {
  let best = null;
  let distance = reach;
  for (const mark of marks) {
    const away = Math.hypot(mark.x - position.x, mark.y - position.y);
    if (away <= distance) {
      best = mark;
      distance = away;
    }
  }
  return best;
}
