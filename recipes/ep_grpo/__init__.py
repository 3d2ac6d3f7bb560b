from recipes.ep_grpo.ep_grpo import METHOD
from verl_ext.registry import register_method

register_method(METHOD)
