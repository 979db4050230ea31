"""Which dtype each layer computes in: global policy, rules, plan, hardware.

`set_global_policy` sets the policy of new layers. `apply_policy` sets the
policies of a model that exists, by rules or by a plan. Rules say which layers
keep a policy of their own, and the first match wins. The result is a plan: the
policy of each layer path, and the reason for it.

A path such as `encoder/block_1/dense` names one layer of a model. Rules match
paths; plans, logs and verdicts name layers by them.

Variables keep their dtype. Weights are float32, and a layer casts them when it
is called.

Files:

- `scope.py`: `set_global_policy` and `policy_scope`: the policy that new layers
  follow, and the rules that go with it.
- `rules.py`: `PrecisionRules`, which layers keep a policy of their own.
- `default_rules.py`: layers that stay in float32 by default, and why.
- `apply.py`: `apply_policy`, for a model that exists.
- `set_policies.py`: sets the policies that rules or a plan chose.
- `plan.py`: `PrecisionPlan`, the policy of each layer.
- `plan_file.py`: reads and writes the file of a plan.
- `layers.py`: walks a model's layers and gives each a path that lasts.
- `graph.py`: a layer's place in the graph of its model.
- `casts.py`: layers whose casts fail, or cost more time than 16 bits save.
- `names.py`: names of dtype policies, and which one a layer follows.
- `rescaled.py`: `RescaledPolicy`, for layers that compute on rescaled inputs.
- `summary.py`: `precision_summary`, the table of layers and dtypes.
- `multiply_adds.py`: estimates the FLOPs of a layer.
- `hardware.py`: `recommend_policy`, which policy suits the hardware.
- `matmul_precision.py`: setter and scope for the precision of float32 products.
- `graph_rewrite.py`: TensorFlow's graph-level mixed precision.
"""
