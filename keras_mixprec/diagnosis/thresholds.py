"""Every threshold of the diagnosis, with its reason.

Frozen on the models whose `source` in `tests/zoo/cases.toml` is `thresholds`,
before the others were written.
"""

# The relative error that a layer's result may have. A chain of float16
# roundings stays below 1% in every healthy model. A model stops training if
# results are off by 60% and more.
FORWARD_ERROR = 0.1

# Gradients of small differences lose more digits and training forgives more.
BACKWARD_ERROR = 0.3

# An error below this share of the two limits above does not count when layers
# are ranked.
NEGLIGIBLE = 0.5

# The relative error that a metric may have: 20 times what rounding each number
# to float16 does to a mean, and less than people compare models by.
METRIC_ERROR = 0.01

# The relative error that the loss may have if no single layer is to blame.
LOSS_ERROR = 0.1

# How often a step runs in float32 with weights and inputs that are off by half
# a rounding step. The loss of ResNet50 on batches of 4 changes by 10% then in
# half of the cases, without any fault.
JITTERS = 3

# Numbers up to this one stand for minus infinity, such as the -1e9 in scores of
# what is masked. Activations that overflow float16 are mostly below 1e6.
MINUS_INFINITY = -1e8

# An error counts if it exceeds this many times what rounding changes. A router
# in bfloat16 is off by 1.5 times and trains. Distances that cancel are off by
# 70 times, and train no more. If rounding changes a result completely, such as
# a mean that is 0, no error of it counts.
BEYOND_NOISE = 8.0
ALL_NOISE = 1.0

# A gradient has to keep this share of its energy (sum of squares) above what
# underflows; DeepSpeed and others lose 5% of the entries without harm.
KEPT_ENERGY = 0.99

# The share by which a layer's gradients may be off because they are small at
# the loss scale in use. With 0.3, as for a layer's own backward pass, a
# classifier ends at an accuracy of .65 instead of .94, because gradients get
# smaller as it learns.
VANISHED = 0.1

# Bits kept below the smallest entry that counts: three, so that it has more
# than one digit. Bits kept above the largest: two, because the next batch has
# larger gradients than this one.
BITS_BELOW = 3
BITS_ABOVE = 2

# Adam moves a weight by rate * g / (|g| + epsilon): below 1% of epsilon by
# less than 1% of a step, in float32 as well.
SHARE_OF_EPSILON = 0.01

# Half the distance to the next float32 number, as a share of the weight.
SHARE_OF_WEIGHT = 2.0**-24

# The loss scales to choose from, as powers of two, if the update rule sets no
# limits. EfficientNets on a batch of 4 need 2**-4, targets of 1e6 need 2**-17,
# and a loss of 1e-10 still vanishes at 2**24.
SCALE_BITS = range(-126, 127)

# The scale that Keras starts from, which decides between equally good ones.
USUAL_SCALE_BITS = 15

# Probed steps that a line is laid through: fewer are a coincidence too often.
TREND_POINTS = 8

# The fall along the line, in standard deviations of what lies off it. Noise
# about a level stays below 2.
TREND_SPREADS = 6.0

# How far ahead to look, in lengths of what was looked at. Training slows
# down: beyond twice that a straight line is no forecast.
TREND_AHEAD = 2.0

# How many times a loss or a weight is larger after training has diverged.
DIVERGED = 100.0

# The growth of the float32 loss of one batch that no training needs. Twelve
# layers of weights that are 1.5 times as large make it 5,000 times as large.
LOSS_DIVERGED = 1e3

# The limit of the loss' growth times the square of the largest weight's growth.
# A bounded loss does not grow while weights grow 300-fold. The loss has to be
# larger, because weights that training needs grow as it falls.
BOTH_DIVERGED = 1e4
WORSE = 2.0

# The share of a change to a layer's own variable that rounding may lose. A
# change below half a 16-bit digit is lost completely.
LOST_CHANGE = 0.5

# Such a variable may end this far from its float32 value, as a share of it. A
# chain of float16 roundings has this effect.
SETTLED_STATE = 0.01

# An average that moves by a smaller share at each step never settles in
# training. The difference of two of its steps is rounding.
SETTLING_SHARE = 1e-4

# How far gradients of two float32 steps at two loss scales may be apart, and
# how many times as far as those at the same scale. Powers of two make no
# rounding, so that a right step differs by nothing; XLA may add up in another
# order.
SCALE_ERROR = 1e-4
SCALE_SPREADS = 8.0

# Smaller ones are not compared: what they are computed from may underflow in
# float32 at a loss scale of 1.
LEAST_GRADIENT = 2.0**-90
