"""`halfbyte recipes`: lists the shipped recipes, or prints one."""

from __future__ import annotations

from argparse import Namespace

from halfbyte.recipes.find import list_recipes, load_recipe, recipe_text, resolved_yaml
from halfbyte.records.errors import UserError
from halfbyte.records.files import dumps


def run(args: Namespace) -> int:
    """Prints the list, a recipe's file with its facts, or with --resolved, --set or --json the whole of it."""
    if args.recipe is None:
        if args.set or args.resolved:
            raise UserError("--set and --resolved need a recipe", "halfbyte recipes NAME --resolved")
        recipes = list_recipes()
        if args.json:
            print(dumps([{"name": name, "description": description} for name, description in recipes]), end="")
        else:
            width = max(len(name) for name, _ in recipes)
            print("\n".join(f"{name:{width}}  {description}" for name, description in recipes))
    elif args.json:
        print(dumps(load_recipe(args.recipe, args.set).model_dump(mode="json")), end="")
    elif args.resolved or args.set:
        print(resolved_yaml(load_recipe(args.recipe, args.set)), end="")
    else:
        text = recipe_text(args.recipe)
        print(text if text.endswith("\n") else f"{text}\n", end="")
        recipe = load_recipe(args.recipe)
        if recipe.facts is not None:  # as comments, so that the output is still the recipe
            print("".join(f"# {line}\n" for line in recipe.facts.lines(trains=recipe.train is not None)), end="")
    return 0
