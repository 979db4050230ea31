// The levels of events. Each has a shape for readers who cannot distinguish colors.
export const LEVELS = {
  bad: { shape: "triangle", glyph: "▲", color: "--bad", label: "severe verdict" },
  warning: { shape: "diamond", glyph: "◆", color: "--warning", label: "warning" },
  info: { shape: "circle", glyph: "●", color: "--info", label: "information" },
  demote: { shape: "down", glyph: "▼", color: "--demote", label: "demoted to a wider dtype" },
  promote: { shape: "up", glyph: "△", color: "--promote", label: "returned to 16 bits" },
  skip: { shape: "tick", glyph: "❙", color: "--skip", label: "skipped step" },
};

// Each state of a run has a word and a shape, for readers who cannot distinguish colors.
export const STATES = {
  healthy: { glyph: "✓", word: "Healthy", level: "fine" },
  repaired: { glyph: "✓", word: "Repaired", level: "fine" },
  warning: { glyph: "◆", word: "Warning", level: "warning" },
  severe: { glyph: "▲", word: "Severe finding", level: "bad" },
  not_measured: { glyph: "○", word: "Not measured", level: "unknown" },
  not_compared: { glyph: "○", word: "Not compared", level: "unknown" },
  failing: { glyph: "▲", word: "Failing", level: "bad" },
};

/** Returns the row of the event list that contains an event of a run. */
export function rowOfEvent({ told }, place) {
  return told.find(({ events }) => events.includes(place)) ?? null;
}

/** Returns the event of the main finding, as the log has it. */
export function mainEvent({ events, finding }) {
  return finding ? events[finding.event] : null;
}
