import { formatInteger, formatNumber, formatScale } from "./format.js";

// What the lines of loss scales show: a row for each change.
export function rowsOfScale(runs) {
  return runs.flatMap((data) => data.scale.flatMap((line) => {
    return line.steps.map((step, index) => [
      data.run, line.optimizer, formatInteger(step), formatScale(line.scale[index]),
      formatInteger(line.skipped[index]),
    ]);
  }));
}

export function rowsOfLoss(runs) {
  return runs.flatMap(({ run, loss }) => (loss?.steps ?? []).map((step, index) => {
    return [run, formatInteger(step), formatNumber(loss.values[index])];
  }));
}
