"""Every threshold of the diagnosis, with its reason.

The thresholds were set on the models whose `source` in `tests/zoo/cases.toml`
is `thresholds`. The other models were written afterwards, and test them.
"""

# The limit for the relative error of a layer's result. Float16 rounding stays
# below 1% in every healthy model. A model stops training if results are off by
# 60% or more.
FORWARD_ERROR = 0.1

# The limit for gradients is higher, because small differences lose more digits
# in the backward pass, and training tolerates larger errors there.
BACKWARD_ERROR = 0.3

# Errors below this share of `FORWARD_ERROR` or `BACKWARD_ERROR` do not affect
# the order in which the search suspects layers.
NEGLIGIBLE = 0.5

# The limit for the relative error of a metric. It is 20 times the effect of
# float16 rounding on a mean, and below the differences that matter between
# models.
METRIC_ERROR = 0.01

# The limit for the relative error of the loss if no single layer is to blame.
LOSS_ERROR = 0.1

# The number of float32 steps that measure the noise, with weights and inputs
# off by half a rounding step. The noise can be large without any fault: on
# batches of 4, the loss of ResNet50 changes by 10% in half of such steps.
JITTERS = 3

# Numbers at or below this limit stand for minus infinity, such as the -1e9 in
# masked scores. Activations that overflow float16 are usually below 1e6.
MINUS_INFINITY = -1e8

# An error counts if it exceeds the float32 noise by this factor. A router in
# bfloat16 has an error of 1.5 times the noise, and trains. Distances with
# cancellation have an error of 70 times the noise, and do not train. If the
# noise is as large as the result, as for a mean of 0, no error counts.
BEYOND_NOISE = 8.0
ALL_NOISE = 1.0

# The share of a gradient's energy (sum of squares) that must not underflow.
# DeepSpeed and other systems lose 5% of the entries without harm.
KEPT_ENERGY = 0.99

# The limit for the error of a layer's gradients from underflow at the current
# loss scale. Gradients get smaller as a model learns, so the limit is lower
# than `BACKWARD_ERROR`. With a limit of 0.3, a classifier reached an accuracy
# of 0.65 instead of 0.94.
VANISHED = 0.1

# The margins of the loss scale, in bits. Three bits between underflow and the
# smallest gradient that counts keep more than one digit of this gradient. Two
# bits between the largest gradient and overflow leave room for larger gradients
# in the next batch.
BITS_BELOW = 3
BITS_ABOVE = 2

# Adam moves a weight by rate * g / (|g| + epsilon). If |g| is below 1% of
# epsilon, the weight moves by less than 1% of a step even in float32.
SHARE_OF_EPSILON = 0.01

# The smallest change of a weight that does not round to nothing, as a share of
# the weight. The change is half the distance to the next float32 number.
SHARE_OF_WEIGHT = 2.0**-24

# The loss scales to choose from, as powers of two, if the update rule sets no
# limits. EfficientNets on a batch of 4 need 2**-4, targets of 1e6 need 2**-17,
# and a loss of 1e-10 still underflows at 2**24.
SCALE_BITS = range(-126, 127)

# Keras' initial loss scale, as a power of two. Of equally good loss scales, the
# diagnosis advises the one nearest to Keras' scale.
USUAL_SCALE_BITS = 15

# The number of measurements that a trend line is fitted to. Fewer measurements
# lie on a line by chance too often.
TREND_POINTS = 8

# The minimum drop along a trend line, in standard deviations of the points from
# the line. Noise around a constant stays below 2.
TREND_SPREADS = 6.0

# The maximum time to predict ahead, as a multiple of the measured interval.
# Training slows down, so a straight line predicts no further than twice the
# interval.
TREND_AHEAD = 2.0

# Training has diverged if a loss or a weight has grown by this factor.
DIVERGED = 100.0

# Training has diverged if the float32 loss of one batch has grown by this
# factor. If the weights of twelve layers become 1.5 times as large, the loss
# becomes 5,000 times as large.
LOSS_DIVERGED = 1e3

# The limit for the growth of the loss times the squared growth of the largest
# weight. A bounded loss does not grow while weights grow 300-fold. The loss
# itself must have doubled, because useful weights grow while the loss falls.
BOTH_DIVERGED = 1e4
WORSE = 2.0

# The share of a change that rounding may lose, for a variable that a layer
# updates itself, such as a moving average. A change below half a 16-bit digit
# is lost completely.
LOST_CHANGE = 0.5

# A variable that a layer updates itself may end this far from its float32
# value, as a share of the value. Ordinary float16 rounding has this effect.
SETTLED_STATE = 0.01

# A moving average settles too slowly for training if each step covers less than
# this share of the remaining way. Two such steps differ only by rounding.
SETTLING_SHARE = 1e-4

# The limits for the difference between float32 gradients at two loss scales:
# absolute, and as a multiple of the difference at one scale. Powers of two
# cause no rounding, so correct steps agree unless XLA sums in a different
# order.
SCALE_ERROR = 1e-4
SCALE_SPREADS = 8.0

# Gradients below this limit are not compared. At a loss scale of 1, the numbers
# from which such gradients are computed may underflow even in float32.
LEAST_GRADIENT = 2.0**-90
