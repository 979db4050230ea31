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
    [0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115],
    [138, 134, 120], [165, 156, 116], [195, 179, 105], [225, 204, 85],
    [254, 232, 56]
  ],
  "quiet": [148, 163, 180],
  "levels": {"bad": "vermillion", "warning": "orange", "zero": "sky", "input": "purple"},
  "passed": [238, 184, 150],
  "beyond": [176, 182, 190],
  "roomy": [203, 211, 221],
  "headroom": {"warning": 2, "full": 24, "ramp": 0.72}
};
