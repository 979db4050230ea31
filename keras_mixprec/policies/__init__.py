"""Which dtype each layer computes in: global policy, rules, plan, hardware."""
