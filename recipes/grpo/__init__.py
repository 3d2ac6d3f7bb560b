"""verl's own `grpo` in the same harness: the baseline beside which every recipe is read. It registers nothing."""
