// Show an answer whole and piece by piece, and compare the elements.
Promise.all([import('/page/tokens.js'), import('/page/answer.js')]).then(([tokens, { Answer }]) => {
  const pieces = ['Hi', '\n', '```', 'py\n', 'x', ' =', ' 1\n', '\n', 'y\n', '``', '`\n', '*a*', '\n```', '\n', 'z',
    '~~', ' b'];
  const show = (sizes) => {
    const answer = new Answer('/v1/chat/completions', {});
    const root = document.createElement('article');
    const part = document.createElement('div');
    const view = new tokens.TokenView(answer, false);
    const grown = new tokens.PartView(answer, part);
    root.append(view.element, part);
    let index = 0;
    for (const size of sizes) {
      for (const text of pieces.slice(index, index + size)) {
        answer.tokens.push({ id: 0, bytes: [], origin: 'sampled', logprob: null, top: null });
        answer.tokenText.push([...new TextEncoder().encode(text)]);
        answer.content += text;
      }
      index += size;
      view.update();
      grown.update(answer.content);
    }
    return [view.element.innerHTML, part.innerHTML];
  };
  const [whole, single] = [show([pieces.length]), show(pieces.map(() => 1))];
  return whole.map((html, index) => html === single[index]);
})
