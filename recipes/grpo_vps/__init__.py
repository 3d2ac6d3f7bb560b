from recipes.grpo_vps.grpo_vps import METHOD
from verl_ext.registry import register_method

register_method(METHOD)
