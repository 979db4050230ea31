import { eventTitle, mainFinding } from "./event_text.js";
import { formatNumber, formatShare } from "./format.js";
import { shortRun } from "./names.js";
import { hasNo16Bits } from "./precision.js";
import {
  differs, fasterOrSlower, inTimes, memoryBeside, speedBeside, speedRatio, timesRange,
} from "./speed.js";

/**
 * Whether a run is what others are compared with to see what 16 bits bring: one that a tuner
 * has moved to float32 is not.
 */
export function isFloat32(run) {
  return run.layers.length > 0 && run.policy === "float32";
}

// What runs were compiled with, and how much of them is in 16 bits by now.
function precisions(run, other, its) {
  const shares = [run, other].map((data) => data.share_of_flops?.now ?? null);
  return [
    run.policy === other.policy ? `both compiled with ${run.policy}` :
      `compiled with ${run.policy} (${its}: ${other.policy})`,
    shares.includes(null) ? null :
      `${formatShare(shares[0])} of FLOPs in 16 bits (${its}: ${formatShare(shares[1])})`,
  ];
}

// What is faster and ends elsewhere is no gain.
function lastLosses(run, other, of) {
  const [own, its] = [run, other].map(({ loss }) => loss?.values.at(-1));
  return [own, its].every(Number.isFinite) ?
    `last loss ${formatNumber(own)} (${of}: ${formatNumber(its)})` : null;
}

/**
 * How fast a run is beside one of the same layers that computes in float32
 * alone, `null` if the other does not, or too little was measured of either.
 * @returns {string | null}
 */
export function speedAgainstFloat32(run, other) {
  const isAlike = other && isFloat32(other) && layerPaths(run) === layerPaths(other);
  const speed = isAlike && run !== other ? speedRatio(run, other) : null;
  if (!speed?.enough) return null;
  const found = openFinding(run);
  const losses = lastLosses(run, other, "there");
  const beside = `${losses ? `; ${losses}` : ""}${found ? `; open finding: ${found}.` : "."}`;
  const of = `the speed of ${shortRun(other.run, run.run)}`;
  const how = fasterOrSlower(speed);
  return (differs(speed) ?
    `${how[0].toUpperCase()}${how.slice(1)} than in float32, at ${inTimes(speed)} ${of}` :
    `No difference in speed from float32 was seen (${timesRange(speed)} ${of})`) + beside;
}

// What is wrong with a run and not repaired: its speed alone would recommend it.
function openFinding(run) {
  const event = mainFinding(run);
  const isOpen = event && !run.finding.repaired && event.level !== "info";
  return isOpen ? eventTitle(event) : null;
}

function layerPaths(run) {
  return run.layers.map((layer) => layer.path).sort().join("\n");
}

/**
 * What a run is beside another, in a line; with one in float32 that is whether 16 bits were
 * worth it.
 * @returns {string}
 */
export function comparison(run, other) {
  // What is asked is what 16 bits bring, whichever of the two is shown.
  if (isFloat32(run) && !isFloat32(other) && other.layers.length) return comparison(other, run);
  const names = [shortRun(run.run, other.run), shortRun(other.run, run.run)];
  const [, its] = names;
  const parts = [
    speedBeside(run, other),
    lastLosses(run, other, its),
    memoryBeside(run, other),
    ...precisions(run, other, its),
  ];
  const open = [run, other].flatMap((data, place) => {
    const found = openFinding(data);
    return found ? [`; open finding of ${names[place]}: ${found}`] : [];
  });
  const question = isFloat32(run) === isFloat32(other) || hasNo16Bits(run) ? "" : "Was it worth it? ";
  return question + parts.filter(Boolean).join("; ") + open.join("");
}
