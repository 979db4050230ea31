// Shapes repeat what colours say, for readers who cannot distinguish the colours.
export const LEVELS = {
  bad: { shape: "triangle", glyph: "▲", color: "--bad", label: "severe verdict" },
  warning: { shape: "diamond", glyph: "◆", color: "--warning", label: "warning" },
  info: { shape: "circle", glyph: "●", color: "--info", label: "information" },
  demote: { shape: "down", glyph: "▼", color: "--demote", label: "demoted to a wider dtype" },
  promote: { shape: "up", glyph: "△", color: "--promote", label: "returned to 16 bits" },
  skip: { shape: "tick", glyph: "❙", color: "--skip", label: "skipped step" },
};

// The run in a sentence comes with a state; a word and a shape say what colour says.
export const STATES = {
  healthy: { glyph: "✓", word: "Healthy", level: "fine" },
  repaired: { glyph: "✓", word: "Repaired", level: "fine" },
  warning: { glyph: "◆", word: "Warning", level: "warning" },
  severe: { glyph: "▲", word: "Severe finding", level: "bad" },
  not_measured: { glyph: "○", word: "Not measured", level: "unknown" },
  not_compared: { glyph: "○", word: "Not compared", level: "unknown" },
  failing: { glyph: "▲", word: "Failing", level: "bad" },
};

/** The row of the list of events that an event of a run is in. */
export function rowOfEvent({ told }, place) {
  return told.find(({ events }) => events.includes(place)) ?? null;
}

/** The event that the sentence on a run begins with, as the log has it. */
export function mainEvent({ events, finding }) {
  return finding ? events[finding.event] : null;
}
