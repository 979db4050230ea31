"""Sets the dtype that each layer computes in, by policies, rules and plans.

`set_global_policy` sets the policy of new layers. `apply_policy` sets the
policies of an existing model, by rules or by a plan. A rule gives some layers a
different policy, and the first rule that matches a layer wins. The result is a
plan: the policy of each layer path, and the reason for it.

A path such as `encoder/block_1/dense` names one layer of a model. Rules match
paths, and plans, logs and verdicts name layers by their path.

Variables keep their dtype. Weights are float32, and a layer casts them when it
is called.

Files:

- `scope.py`: `set_global_policy` and `policy_scope`, for the policy of new
  layers and its rules.
- `rules.py`: `PrecisionRules`, which give some layers a different policy.
- `default_rules.py`: layers that stay in float32 by default, and why.
- `apply.py`: `apply_policy`, for existing models.
- `set_policies.py`: sets the policies that rules or a plan chose.
- `plan.py`: `PrecisionPlan`, the policy of each layer.
- `plan_file.py`: reads and writes the file of a plan.
- `layers.py`: walks a model's layers and gives each one a stable path.
- `graph.py`: finds a layer's place in the graph of its model.
- `casts.py`: finds layers whose casts fail, or cost more than 16 bits save.
- `names.py`: the names of dtype policies, and the policy of each layer.
- `rescaled.py`: `RescaledPolicy`, for layers that compute on rescaled inputs.
- `summary.py`: `precision_summary`, the table of layers and dtypes.
- `multiply_adds.py`: estimates the FLOPs of a layer.
- `hardware.py`: `recommend_policy`, which picks a policy for the hardware.
- `matmul_precision.py`: setter and scope for the precision of float32 products.
- `graph_rewrite.py`: TensorFlow's graph-level mixed precision.
"""
