"""A base model, its TempNets and its loss in one module whose forward returns the loss."""
