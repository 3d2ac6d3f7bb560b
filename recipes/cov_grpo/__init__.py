from recipes.cov_grpo.cov_grpo import METHOD
from verl_ext.registry import register_method

register_method(METHOD)
