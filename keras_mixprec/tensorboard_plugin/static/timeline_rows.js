// What the lines of loss scales show: a row for each change.
export function rowsOfScale(runs) {
  return runs.flatMap((data) => data.scale.flatMap((line) => line.steps.map((step, index) => {
    return [data.run, line.optimizer, step, line.scale[index], line.skipped[index]];
  })));
}

export function rowsOfLoss(runs) {
  return runs.flatMap(({ run, loss }) => (loss?.steps ?? []).map((step, index) => [run, step, loss.values[index]]));
}
