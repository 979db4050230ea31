export const COLORS = {
  "category": {
    "orange": [230, 159, 0],
    "sky": [86, 180, 233],
    "green": [0, 158, 115],
    "blue": [0, 114, 178],
    "vermillion": [213, 94, 0],
    "purple": [204, 121, 167]
  },
  "ramp": [
    [25, 26, 93], [0, 52, 117], [0, 78, 126], [10, 102, 129], [52, 126, 128],
    [91, 148, 122], [134, 169, 112], [177, 190, 99], [217, 210, 83],
    [254, 232, 56]
  ],
  "quiet": [148, 163, 180],
  "levels": {"bad": "vermillion", "warning": "orange", "zero": "sky", "input": "purple"},
  "passed": [238, 184, 150],
  "beyond": [176, 182, 190],
  "roomy": [203, 211, 221],
  "headroom": {"warning": 2, "full": 24, "ramp": 0.8}
};
