"""Keep chosen layers in float32, and save the choice as a plan.

The script prints the policy for this device, and the dtype of each layer with
the reason. It then applies the saved plan to a fresh model, and prints the
number of layers that differ from the plan.
Run it with `python examples/keep_layers_in_float32.py`.
"""

import keras
from keras import layers

import keras_mixprec as kmp


class ScaleNorm(layers.Layer):
    """A custom normalization, which `DEFAULT_RULES` keep in float32."""

    def call(self, x):
        return x * keras.ops.rsqrt(keras.ops.sum(x * x, -1, keepdims=True))


def build():
    inputs = keras.Input((16, 32))
    x = layers.MultiHeadAttention(4, 8, name="attention")(inputs, inputs)
    x = ScaleNorm(name="norm")(x)
    x = layers.Dense(64, activation="gelu", name="hidden")(x)
    x = layers.GlobalAveragePooling1D(name="mean")(x)
    return keras.Model(inputs, layers.Dense(5, name="logits")(x))


print("For this device:", kmp.recommend_policy(), "\n")

model = build()
mine = kmp.PrecisionRule(
    "attention/softmax", reason="the scores of this model reach 80,000"
)
plan = kmp.apply_policy(
    model, "mixed_float16", rules=[mine, *kmp.DEFAULT_RULES]
)
print(kmp.precision_summary(model), "\n")
print(plan, "\n")
plan.save("plan.json")

fresh = build()
kmp.PrecisionPlan.load("plan.json").apply(fresh)
left = plan.diff(kmp.PrecisionPlan.from_model(fresh))
print(f"Layers of the fresh model that differ from the plan: {len(left)}")
