"""Distribution: process groups, sharding, DeepSpeed and its operators."""
