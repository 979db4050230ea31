export function createStore(initial) {
  let state = { ...initial };
  const listeners = [];
  return {
    get state() {
      return state;
    },
    set(patch) {
      const changed = Object.keys(patch).filter((key) => {
        return !Object.is(patch[key], state[key]);
      });
      if (!changed.length) return;
      state = { ...state, ...patch };
      for (const { keys, listener } of listeners) {
        if (keys.some((key) => changed.includes(key))) listener(state, changed);
      }
    },
    on(keys, listener) {
      listeners.push({ keys, listener });
    },
  };
}
