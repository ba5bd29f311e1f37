"""The problems the ladder climbs: one package per problem."""
