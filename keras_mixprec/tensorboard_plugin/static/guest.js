const PATIENCE = 2000;

// Connects the page to TensorBoard by messages, as TensorBoard's plugins do.
export function connectHost() {
  const listeners = new Map();
  const waiting = new Map();
  let lastId = 0;
  if (window.parent === window) return null;
  const channel = new MessageChannel();
  const port = channel.port1;
  const send = (message) => port.postMessage(JSON.stringify(message));
  port.onmessage = (event) => {
    const { type, id, payload, error, isReply } = JSON.parse(event.data);
    if (isReply) {
      const answer = waiting.get(id);
      waiting.delete(id);
      answer?.(error ? null : payload);
      return;
    }
    listeners.get(type)?.(payload);
    send({ type, id, payload: null, error: null, isReply: true });
  };
  window.parent.postMessage("experimental.bootstrap", "*", [channel.port2]);
  return {
    on: (type, listener) => listeners.set(type, listener),
    ask(type, payload = null) {
      lastId += 1;
      const id = lastId;
      return new Promise((resolve, reject) => {
        waiting.set(id, resolve);
        send({ type, id, payload, error: null, isReply: false });
        setTimeout(() => {
          if (waiting.delete(id)) reject(new Error(`no answer to ${type}`));
        }, PATIENCE);
      });
    },
  };
}
