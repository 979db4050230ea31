const CHANGES = ["demote", "shrink", "promote", "undo"];

/**
 * Which layers ever changed their dtype: from which step to which, and why.
 * @param {any[]} layers The table of layers.
 * @param {any[]} events
 * @param {number} lastStep
 * @returns {{path: string, bars: {from: number, until: number, dtype: string,
 *   reason: string | null}[]}[]}
 */
export function dtypeBars(layers, events, lastStep) {
  const changes = events.filter(({ kind, dry_run: dry }) => CHANGES.includes(kind) && !dry);
  return layers.flatMap((layer) => {
    const own = changes.filter((event) => event.layers?.[layer.path]);
    const dtypes = layer.dtypes ?? [];
    if (dtypes.length < 2 && !own.length) return [];
    const bars = dtypes.map(([from, dtype], place) => {
      const event = own.findLast(({ step }) => step === from);
      return {
        from, until: dtypes[place + 1]?.[0] ?? Math.max(lastStep, from), dtype,
        reason: event ? event.because?.[layer.path] ?? event.message ?? event.kind : null,
      };
    });
    // What it was compiled with, if that changed before the first step.
    const first = own.find(({ step }) => step === dtypes[0]?.[0])?.layers[layer.path];
    const dtype = first?.before?.replace(/^mixed_/, "");
    if (dtype) bars.unshift({ from: bars[0].from, until: bars[0].from, dtype, reason: null });
    return [{ path: layer.path, bars }];
  });
}
